"""Priorities are learned again, on all ranks alike, when a model's path changes for good."""

from __future__ import annotations

from typing import Any

import torch

import foreprop
from foreprop.core.frames import PACE_STEPS
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.parity import seeded

STEPS = 6 * PACE_STEPS
TURNED_AT = 3
"""From this step on the layers are used the other way round."""


class Turning(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(3))
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = layer(x)
        return x


def train(world: World, turns: bool, **settings: Any) -> tuple[list[int], list[torch.Tensor]]:
    """The priorities at the end, and the parameters."""
    with seeded():
        model = Turning()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"architecture": "p2p", **settings}  # collectives keep their plan
    with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
        for step in range(1, STEPS + 1):
            model.turned = turns and step >= TURNED_AT
            optimizer.zero_grad()
            model(torch.ones(2, 8) * (world.rank + 1)).square().mean().backward()
            optimizer.step()
            if not turns and step % PACE_STEPS == 0:
                model.state_dict()  # uses all of them, in another order
        session.flush()
        engine: Any = session._training.backends.engines[0]  # type: ignore[attr-defined]
        priorities = [engine.priority_of(number) for number in range(3)]
        return priorities, [parameter.detach().clone() for parameter in model.parameters()]


def check_alike(results: list[tuple[list[int], list[torch.Tensor]]], expected: list[int]) -> None:
    for priorities, parameters in results:
        assert priorities == expected
        assert all(map(torch.equal, parameters, results[0][1]))


def test_the_new_order_becomes_everybodys() -> None:
    check_alike(run_cluster(2, lambda world: train(world, turns=True)), [2, 1, 0])


def test_a_path_that_stays_keeps_its_order() -> None:
    """A checkpoint, which reads parameters in their own order, says nothing about it."""
    check_alike(run_cluster(2, lambda world: train(world, turns=False)), [0, 1, 2])


def test_workers_that_update_learn_it_too() -> None:
    check_alike(run_cluster(2, lambda world: train(world, turns=True, update="workers")), [2, 1, 0])
