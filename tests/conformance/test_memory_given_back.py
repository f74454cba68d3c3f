"""Averages that come late take no memory until then, and are the same to the bit.

Every parameter's room is given to the system as its gradient leaves, but in elastic sessions, and
servers keep no page of what is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import clip_grad_norm_

from foreprop.engine import memory, sums, worker
from tests.conformance.averaging_by_hand import Average, ReadingLoop, backward, check_contract
from tests.conformance.parity import Batch, servers_only, with_sgd


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.WorkerEngine, "is_ahead", True)
    monkeypatch.setattr(memory, "_LEAST_DROPPED_BYTES", 2 * 4096)
    monkeypatch.setattr(sums, "_LEAST_SPARE_BYTES", 0)
    monkeypatch.setattr(sums, "_SPARE_SHARE", 1 << 40)


def wide_model() -> nn.Sequential:
    """Of matrices of some pages."""
    return nn.Sequential(nn.Linear(5, 90), nn.Tanh(), nn.Linear(90, 90), nn.Linear(90, 3))


def plain(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        average(model)
        optimizer.step()


def zeroed(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        backward(model, batch)
        average(model)
        optimizer.step()


def growing(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
    """One pass more in each step than in the one before; the second step is skipped."""
    left = iter(batches)
    for step, passes in enumerate((1, 2, 3)):
        optimizer.zero_grad()
        for batch, _ in zip(left, range(passes), strict=False):
            backward(model, batch)
        average(model)
        if step != 1:
            optimizer.step()


def clipping(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        average(model)
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("loop", [plain, zeroed, growing, clipping])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("elastic", [False, pytest.param(True, marks=servers_only)])
def test_averages_are_the_same(loop: ReadingLoop, ranks: int, *, elastic: bool) -> None:
    rtol = 1e-5 if loop is clipping else 0.0
    about = with_sgd(wide_model), loop
    check_contract(*about, ranks=ranks, steps=6, slice_elems=4000, rtol=rtol, elastic=elastic)
