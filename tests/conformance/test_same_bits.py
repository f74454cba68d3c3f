"""The same data gives the same bits, whatever the settings (docs/architecture.md, "Same bits")."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from foreprop import PRESETS
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Trained,
    batches_of,
    check_close,
    check_same_bits,
    check_same_optimizer_state,
    merge,
    run_foreprop,
    run_plain,
    train_classifier,
    with_sgd,
)

OPTIMIZERS = {
    "sgd": with_sgd(weight_decay=0.01),
    "adam": lambda: _with(torch.optim.Adam, lr=0.01),
    "adagrad": lambda: _with(torch.optim.Adagrad, lr=0.05),
}
SIZES = (1, 7, 1000)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def _with(cls: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    return model, cls(model.parameters(), **options)


def _build(optimizer: str) -> Any:
    return with_sgd(_model, weight_decay=0.01) if optimizer == "sgd" else OPTIMIZERS[optimizer]


@cache
def _reference(world_size: int, optimizer: str) -> Trained:
    """World 1: plain PyTorch. Otherwise the preset p3's first run."""
    by_rank = batches_of(world_size, count=3)
    if world_size == 1:
        return run_plain(_build(optimizer), train_classifier, by_rank[0])
    return run_foreprop(_build(optimizer), train_classifier, by_rank)[0]


def _check(world_size: int, optimizer: str = "sgd", **settings: Any) -> None:
    wanted = _reference(world_size, optimizer)
    by_rank = batches_of(world_size, count=3)
    for got in run_foreprop(_build(optimizer), train_classifier, by_rank, **settings):
        check_same_bits(got.model, wanted.model)
        check_same_optimizer_state(got.optimizer, wanted.optimizer)


@pytest.mark.parametrize(("preset", "world_size"), few(PRESETS, [1, 2, 4]))
def test_every_preset(preset: str, world_size: int) -> None:
    _check(world_size, preset=preset)


@pytest.mark.parametrize(("slice_elems", "world_size", "optimizer"), few(SIZES, [1, 2], OPTIMIZERS))
def test_every_slice_size(slice_elems: int, world_size: int, optimizer: str) -> None:
    _check(world_size, optimizer, slice_elems=slice_elems)


@pytest.mark.parametrize(("world_size", "servers_per_node"), few([1, 2], [1, 2, 3]))
def test_any_number_of_servers(world_size: int, servers_per_node: int) -> None:
    _check(world_size, servers_per_node=servers_per_node, slice_elems=3)


@pytest.mark.parametrize("workers_per_node", [1, 2, 4])
def test_any_number_of_nodes(workers_per_node: int) -> None:
    """One by one; the bits with local aggregation are those of its grouping."""
    settings = {"workers_per_node": workers_per_node, "local_aggregation": "off"}
    _check(4, slice_elems=7, **settings)


@pytest.mark.parametrize(
    ("granularity", "order", "reply"),
    few(["slice", "array"], ["priority", "fifo"], ["broadcast", "notify", "pull"], size=2),
)
def test_each_knob_by_itself(granularity: str, order: str, reply: str) -> None:
    _check(2, granularity=granularity, order=order, reply=reply, placement="kvstore", slice_elems=5)


def test_kvstore_splits_a_big_array_over_all_servers() -> None:
    _check(2, preset="kvstore", big_array_elems=10)


@pytest.mark.parametrize(("world_size", "optimizer"), few([2, 4], OPTIMIZERS))
def test_n_workers_equal_one_process_with_the_n_fold_batch(world_size: int, optimizer: str) -> None:
    by_rank = batches_of(world_size, count=3)
    plain = run_plain(_build(optimizer), train_classifier, merge(by_rank))
    check_close(_reference(world_size, optimizer).model, plain.model)


def test_two_runs_are_alike() -> None:
    _check(4)
    _check(4)
