"""Rows that take memory when they are put."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foreprop.features.tables.rowtable import RowTable, lazy_zeros

ROWS = 9
NUMBERS = st.lists(st.integers(0, ROWS - 1), max_size=5, unique=True)


def squares(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers**2)[:, None].expand(-1, 2).float()


@given(st.lists(st.tuples(NUMBERS, st.floats(-9, 9, width=32)), max_size=6), NUMBERS)
def test_what_has_been_put_is_there_and_the_rest_is_made(
    puts: list[tuple[list[int], float]], wanted: list[int]
) -> None:
    table = RowTable(ROWS, 2, torch.float32, squares)
    known: dict[int, float] = {}
    for numbers, value in puts:
        chosen = torch.tensor(numbers, dtype=torch.int64)
        table.put(chosen, torch.full((len(numbers), 2), value))
        known |= dict.fromkeys(numbers, value)
    taken = table.take(torch.tensor(wanted, dtype=torch.int64))
    assert taken.tolist() == [[known.get(n, float(n**2))] * 2 for n in wanted]
    taken.fill_(1)  # a copy
    for limit in (1, 3, 100):
        parts = [table.kept_at(first, limit).tolist() for first in range(0, ROWS + limit, limit)]
        assert all(part == sorted(part) for part in parts)
        assert sorted(number for part in parts for number in part) == sorted(known)
    places = table.places(torch.arange(ROWS))
    assert (places >= 0).nonzero()[:, 0].tolist() == sorted(known)
    assert sorted(places[places >= 0].tolist()) == list(range(len(known)))
    assert torch.equal(table.keep(torch.tensor([4])), table.places(torch.tensor([4])))
    assert table.take(torch.tensor([4])).tolist() == [[known.get(4, 16.0)] * 2]
    table.forget()
    assert table.kept_at(0, 9).tolist() == []
    assert table.take(torch.arange(ROWS)).tolist() == squares(torch.arange(ROWS)).tolist()


def test_without_a_way_to_make_rows_all_are_there() -> None:
    table = RowTable(ROWS, 2, torch.bfloat16)
    table.put(torch.tensor([3]), torch.ones(1, 2, dtype=torch.bfloat16))
    assert table.take(torch.tensor([3, 0])).tolist() == [[1, 1], [0, 0]]
    assert table.kept_at(2, 3).tolist() == [2, 3, 4]
    assert table.whole.shape == (ROWS, 2)
    assert RowTable(0, 2, torch.float32).whole.shape == (0, 2)


def test_what_has_not_been_written_takes_no_memory() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as status:
            return int(status.read().split()[1]) * 4096

    before = resident_bytes()
    table = RowTable(10**9, 64, torch.float32, lambda numbers: torch.ones(len(numbers), 64))
    numbers = torch.arange(0, 10**9, 10**4)
    assert table.take(numbers).sum() == 6_400_000
    table.put(numbers, torch.zeros(100_000, 64))
    assert table.take(numbers).sum() == 0
    taken = resident_bytes() - before
    assert taken < 4 * 100_000 * 64 * 4, f"{taken} bytes"  # of 256 GB, with temporaries
    assert len(lazy_zeros((10**12,), torch.uint8)) == 10**12
