"""Trains a scenario on a device, and compares what is to be the same.

A scenario knows nothing of devices but where its model and batches are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.parity import Batch, batches_of, seeded

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Scenario:
    """A model, an optimizer and a user's loop."""

    model: Callable[[], nn.Module]
    loop: Callable[..., Any]
    optimizer: Optimizers = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    local_size: int = 1
    steps: int = 4


def train(
    scenario: Scenario,
    device: str,
    *,
    on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[dict[str, torch.Tensor]]:
    """By rank: all that is to be the same, in host memory.

    ``on_stream``: makes what is around all that a rank does.
    """
    by_rank = batches_of(scenario.ranks, count=scenario.steps)

    def work(world: World) -> dict[str, torch.Tensor]:
        torch.autograd.set_multithreading_enabled(False)
        with on_stream():
            return _train_rank(scenario, world, by_rank[world.rank], device)

    return run_cluster(scenario.ranks, work, local_size=scenario.local_size)


def _train_rank(
    scenario: Scenario, world: World, batches: Sequence[Batch], device: str
) -> dict[str, torch.Tensor]:
    with seeded(world.rank):
        torch.__future__.set_swap_module_params_on_conversion(True)  # arrays stay tied
        model = scenario.model().to(device)
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer = scenario.optimizer(model)
    there = [tuple(part.to(device) for part in batch) for batch in batches]
    with foreprop.parallelize(model, optimizer, world=world, **scenario.settings) as session:
        found = scenario.loop(model, optimizer, there, session)
        kept = to_host({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
    return {**kept, **to_host({"found": found})}


def to_host(values: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Tensors and numbers of any nesting, by where they are."""
    if isinstance(values, torch.Tensor):
        return {name: values.detach().cpu().clone()}
    if isinstance(values, (int, float)):
        return {name: torch.tensor(float(values), dtype=torch.float64)}
    if isinstance(values, (list, tuple)):
        values = dict(enumerate(values))
    if not isinstance(values, Mapping):
        return {}
    flat: dict[str, torch.Tensor] = {}
    for key, value in values.items():
        flat |= to_host(value, f"{name}.{key}")
    return flat


def check_same(
    got: Sequence[Mapping[str, torch.Tensor]], wanted: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    for rank, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert list(ours) == list(theirs), (list(ours), list(theirs))
        wrong = [name for name, value in theirs.items() if not _is_same(ours[name], value)]
        assert not wrong, f"rank {rank}: {wrong} differ"


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(
        ours.nan_to_num(nan=12345.0), theirs.nan_to_num(nan=12345.0)
    )
