"""Training with a GradScaler in which one step is bad, with one process or many."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.aggregation_runs import Values, values_of
from tests.conformance.parity import Batch, Build, build_seeded, check_same_bits, merge

BAD_STEP = 2
Run = tuple[Values, list[float], list[dict[str, Any]]]
"""By step: the parameters, the scale before it, the optimizer's state."""


def make_scaler(**options: Any) -> torch.amp.GradScaler:
    settings = {"init_scale": 256.0, "growth_interval": 2, **options}
    return torch.amp.GradScaler("cpu", **settings)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Sequence[Batch],
    *,
    bad_step: int = -1,
    clip: float | None = None,
) -> Run:
    """``bad_step`` is one whose loss is infinite."""
    values, scales, states = [], [], []
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if step == bad_step:
            loss = loss * torch.inf
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        values.append(values_of(model))
        states.append(copy.deepcopy(optimizer.state_dict()["state"]))
    scales.append(scaler.get_scale())
    return values, scales, states


def alone(build: Build, by_rank: Sequence[Sequence[Batch]], **options: Any) -> Run:
    model, optimizer = build_seeded(build)
    return train(model, optimizer, make_scaler(), merge(by_rank), **options)


def together(
    build: Build,
    by_rank: Sequence[Sequence[Batch]],
    *,
    bad_rank: int = -1,
    local_size: int = 1,
    **settings: Any,
) -> Run:
    """Only ``bad_rank`` has a bad step; all must skip it, and agree on every bit and scale."""

    def work(world: World) -> Run:
        model, optimizer = build_seeded(build, seed=world.rank)
        scaler, bad_step = make_scaler(), BAD_STEP if world.rank == bad_rank else -1
        with foreprop.parallelize(model, optimizer, world=world, scaler=scaler, **settings):
            run = train(model, optimizer, scaler, by_rank[world.rank], bad_step=bad_step)
        assert not {"step", "update", "unscale_"} & set(vars(scaler))
        return run

    ones, *others = run_cluster(len(by_rank), work, local_size=local_size)
    for other in others:
        assert other[1] == ones[1]
        for got, wanted in zip(other[0], ones[0], strict=True):
            check_same_bits(got, wanted)
    return ones
