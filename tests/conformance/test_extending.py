"""The closing rule and the trainer that docs/extending.md shows, in sessions of two ranks."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import foreprop
from foreprop.core.collect import UpdateSlice
from foreprop.core.frames import PushArrived
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    check_same_bits,
    run_foreprop,
    run_plain,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.plugins import PAGE

pytestmark = servers_only


def shown(name: str, **names: Any) -> Any:
    """What the page's block that defines it makes, where these names are known."""
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if f"class {name}(" in block]
    exec(block, names)
    return names[name]


@pytest.fixture
def rule() -> Any:
    return shown("FirstRank")


def test_a_rule_is_tried_by_lists_of_instructions(rule: Any) -> None:
    machine = ServerMachine(
        [Slice(0, 0, 0, 1, 0)],
        closing=rule,
        index=0,
        workers=2,
        order="priority",
        reply="broadcast",
        names=["weight"],
    )
    assert machine.handle(PushArrived(0, 0, 1, 0, 0)) == []
    assert machine.handle(PushArrived(1, 0, 1, 0, 0)) == [UpdateSlice(0, 1, (0,), counted=(0,))]


@pytest.mark.parametrize("update", ["workers", "servers"])
def test_a_servers_composition_takes_a_rule(
    rule: Any, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rank 0's gradients alone all ranks train as rank 0 does by itself."""
    monkeypatch.setattr("foreprop.backends.composed.AllMembers", rule)
    by_rank = batches_of(2)
    alone = run_plain(with_sgd(), train_classifier, by_rank[0])
    settings: dict[str, Any] = {"update": update, "plane": "python"}
    for rank in run_foreprop(with_sgd(), train_classifier, by_rank, **settings):
        check_same_bits(rank.model, alone.model)


class Trainer:
    """Somebody's, which has no idea of foreprop."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = self.wrap(model), optimizer

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        raise NotImplementedError("torch.distributed is not initialised")

    def fit(self, loader: Any) -> list[torch.Tensor]:
        for inputs, targets in loader:
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs), targets).backward()
            self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]


class Plain(Trainer):
    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model


def test_a_trainer_without_ddps_wrapper_trains_on_all_ranks_batches() -> None:
    data = TensorDataset(torch.randn(24, 5), torch.arange(24) % 3)

    def fit(world: World) -> list[torch.Tensor]:
        share = partial(foreprop.shard, world=world)
        mini = SimpleNamespace(Trainer=Trainer)
        names = {"mini": mini, "parallelize": foreprop.parallelize, "shard": share}
        model, optimizer = build_seeded(with_sgd(small_model), seed=world.rank)
        trainer = shown("ForepropMini", **names)(model, optimizer, foreprop={"world": world})
        return trainer.fit(DataLoader(data, batch_size=4))

    ranks = run_cluster(2, fit)
    alone = Plain(*build_seeded(with_sgd(small_model))).fit(DataLoader(data, batch_size=8))
    for got, other, wanted in zip(*ranks, alone, strict=True):
        assert torch.equal(got, other)
        torch.testing.assert_close(got, wanted)
