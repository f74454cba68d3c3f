"""A forgotten `shard`: all ranks train on the same batches, and one line says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    batches_of,
    make_batches,
    once,
    run_foreprop,
    train_classifier,
    with_sgd,
)

WARNING = "as if they trained on the same batches"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if WARNING in r.getMessage()]


def train(
    caplog: pytest.LogCaptureFixture, by_rank: Sequence[Sequence[Batch]], **settings: Any
) -> list[str]:
    with caplog.at_level(logging.WARNING, "foreprop"):
        run_foreprop(with_sgd(), train_classifier, by_rank, **settings)
    return lines(caplog)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"update": "servers"},
    {"update": "servers", "clip_grad_norm": 1.0},
    {"clip_grad_norm": 1.0},
    {"preset": "kvstore"},
    {"wire_dtype": "bfloat16"},
    {"compression": "int8"},
    {"elastic": True},
    {"architecture": "ring"},
]


@once
@pytest.mark.parametrize(("settings", "ranks"), few(SETTINGS, [2, 3]))
def test_the_same_batches_on_all_ranks_are_told_once(
    settings: dict[str, Any], ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = train(caplog, [make_batches(count=6)] * ranks, **settings)
    assert f"the gradients of {ranks} ranks were the same in 3 steps" in line


@once
@pytest.mark.parametrize("settings", SETTINGS)
def test_batches_of_each_rank_s_own_are_not(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert train(caplog, batches_of(2, count=6), **settings) == []


@once
def test_a_world_of_one_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert train(caplog, [make_batches(count=6)]) == []


@once
def test_nodes_that_have_the_same_batches_are_told_as_nodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two of two workers each, whose sums the servers see."""
    (line,) = train(caplog, [make_batches(count=6)] * 4, local_size=2)
    assert "the gradients of 2 nodes were the same" in line


@once
@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_gradients_that_do_not_depend_on_the_batch_are_no_sign(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros, and the bias of a sum."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(5, 3)
        nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, _ in batches:
            optimizer.zero_grad()
            (model(0 * x).sum()).backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING, "foreprop"):
        run_foreprop(build, loop, batches_of(2, count=6), architecture=architecture)
    assert lines(caplog) == []
