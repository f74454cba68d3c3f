"""Training that keeps moving averages, with one process or many."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.aggregation_runs import Values, train
from tests.conformance.parity import Batch, Build, build_seeded, check_same_bits

DECAY = 0.7


def alone(build: Build, batches: Sequence[Batch]) -> Values:
    """One process's averages after each step."""
    model, optimizer = build_seeded(build)
    average = copy.deepcopy(model)
    averages: Values = []

    def after_step() -> None:
        with torch.no_grad():
            for mine, value in zip(average.parameters(), model.parameters(), strict=True):
                mine.mul_(DECAY).add_(value, alpha=1 - DECAY)
            for mine, value in zip(average.buffers(), model.buffers(), strict=True):
                mine.copy_(value)
        averages.append({name: v.clone() for name, v in average.state_dict().items()})

    train(model, optimizer, batches, after_step=after_step)
    return averages


def together(build: Build, by_rank: Sequence[Sequence[Batch]], **settings: Any) -> Values:
    """The averages after each step, which all ranks must see alike."""

    def work(world: World) -> Values:
        model, optimizer = build_seeded(build, seed=world.rank)
        averages: Values = []
        with foreprop.parallelize(model, optimizer, world=world, ema=DECAY, **settings) as session:

            def after_step() -> None:
                averages.append(session.ema_state_dict())

            train(model, optimizer, by_rank[world.rank], after_step=after_step)
        return averages

    ones, *others = run_cluster(len(by_rank), work)
    for other in others:
        for step, values in enumerate(ones):
            check_same_bits(other[step], values)
    return ones
