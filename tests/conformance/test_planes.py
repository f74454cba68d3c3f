"""Both planes carry the same frames and bits: ranks may differ in which one they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from foreprop.core.frames import PACE_STEPS
from foreprop.core.norm import SquareSum
from foreprop.engine.native import maybe_library
from foreprop.engine.sums import square_sum
from foreprop.engine.world import World
from foreprop.params import gradientmath
from tests.cluster import run_cluster
from tests.conformance.parity import (
    Batch,
    Build,
    Trained,
    batches_of,
    check_same_bits,
    once,
    run_rank,
    small_model,
    with_sgd,
)

pytestmark = [
    once,
    pytest.mark.skipif(maybe_library() is None, reason="the native plane was not built"),
]

MANY = 2 * PACE_STEPS + 5
"""Batches: after two windows servers tell the norm."""


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def train(build: Build, planes: tuple[str, ...], **settings: Any) -> list[Trained]:
    by_rank: list[list[Batch]] = batches_of(len(planes), count=MANY)

    def work(world: World) -> Trained:
        plane = planes[world.rank]
        return run_rank(world, build, clipped, by_rank[world.rank], plane=plane, **settings)

    return run_cluster(len(planes), work)


@pytest.mark.parametrize("planes", [("native",) * 2, ("python", "native"), ("native", "python")])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"slice_elems": 10},
        {"wire_dtype": "bfloat16"},
        {"wire_dtype": "float16", "slice_elems": 16},
        {"link_rate_bits_per_s": 1e9, "slice_elems": 16},
        {"push_window_bytes": 64, "slice_elems": 8},
        {"preset": "kvstore", "update": "workers"},
        {"preset": "kvstore", "update": "workers", "big_array_elems": 12, "reply": "pull"},
    ],
    ids=str,
)
def test_each_rank_may_run_another_plane(planes: tuple[str, ...], settings: dict[str, Any]) -> None:
    build = with_sgd(small_model)
    wanted = train(build, ("python",) * len(planes), **settings)
    for rank, got in enumerate(train(build, planes, **settings)):
        check_same_bits(got.model, wanted[rank].model)


@pytest.mark.parametrize("planes", [("native",) * 3, ("native", "python", "native")])
@pytest.mark.parametrize("settings", [{}, {"slice_elems": 10}, {"wire_dtype": "bfloat16"}], ids=str)
def test_servers_tell_the_norm_once_all_ranks_ask(
    planes: tuple[str, ...], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that clips then need not wait for averages, nor square them."""
    seen: list[int] = []

    def note(gradient: torch.Tensor) -> SquareSum:
        seen.append(gradient.numel())
        return square_sum(gradient)

    monkeypatch.setattr(gradientmath, "square_sum", note)
    model = small_model()
    parameters, (first, *_) = len(list(model.parameters())), batches_of(1, count=1)

    def work(world: World) -> int:
        steps = [first[0]] * MANY
        run_rank(world, with_sgd(small_model), clipped, steps, plane=planes[world.rank], **settings)
        return len(seen)

    run_cluster(len(planes), work)
    assert len(seen) <= 2 * PACE_STEPS * parameters * len(planes)
