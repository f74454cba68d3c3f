"""Averages moved when it matters, against averages moved in every step."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.features.tables.rowtable import RowAverages, RowTable

DECAY = 0.9


def averages_of(table: torch.Tensor, decay: float) -> RowAverages:
    """The averages of a shard that shares its memory with ``table``."""
    shard = RowTable(*table.shape, table.dtype)
    shard.whole.copy_(table)
    table.set_(shard.whole)
    return RowAverages(shard, decay)


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_late_moves_come_to_what_moves_in_every_step_do(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    rows = chance.randint(1, 6)
    table = torch.randn(rows, 3, dtype=torch.float64)
    lazy, wanted = averages_of(table, DECAY), table.clone()
    for _ in range(chance.randint(1, 40)):
        if chance.random() < 0.1:  # the whole table is replaced, then rows are updated
            lazy.before_change()
            table.copy_(torch.randn(rows, 3))
        touched = torch.tensor(
            [row for row in range(rows) if chance.random() < 0.2], dtype=torch.int64
        )
        lazy.before_change(touched)
        table[touched] += 1.0
        lazy.end_step()
        wanted.lerp_(table, 1 - DECAY)
        if chance.random() < 0.1:
            wanted = torch.randn(rows, 3, dtype=torch.float64)
            lazy.put(torch.arange(rows), wanted)
        if chance.random() < 0.5:
            torch.testing.assert_close(lazy.current(), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lazy.current(), wanted, rtol=1e-12, atol=1e-12)


def test_reading_changes_nothing() -> None:
    tables = [torch.zeros(2, 1), torch.zeros(2, 1)]
    read, unread = (averages_of(table, 0.3) for table in tables)
    for step in range(20):
        for table, averages in zip(tables, (read, unread), strict=True):
            if step % 7 == 0:
                averages.before_change(torch.tensor([0]))
                table[0] += 0.1
            averages.end_step()
        read.current()
    assert torch.equal(read.current(), unread.current())


def test_a_row_that_is_touched_in_every_step_is_moved_as_torch_moves_it() -> None:
    table = torch.randn(4, 3)
    lazy, wanted = averages_of(table, 0.75), table.clone()
    for _ in range(10):
        lazy.before_change()
        table += torch.randn(4, 3)
        lazy.end_step()
        wanted.lerp_(table, 0.25)
    assert torch.equal(lazy.current(), wanted)


def test_a_row_that_is_never_touched_keeps_its_bits() -> None:
    table = torch.randn(3, 5)
    averages = averages_of(table, 0.999)
    for _ in range(100):
        averages.end_step()
    assert torch.equal(averages.current(), table)


def test_halves_have_averages_in_float32_which_are_copies() -> None:
    table = torch.ones(2, 2, dtype=torch.bfloat16)
    averages = averages_of(table, 0.5)
    averages.current().zero_()
    assert torch.equal(averages.current(), torch.ones(2, 2, dtype=torch.float32))
