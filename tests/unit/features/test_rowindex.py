"""Rows and their places, beside a dictionary."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foreprop.features.tables.rowtable import RowIndex

NUMBERS = st.integers(0, 30) | st.integers(0, 2**31 - 1)


@given(st.lists(st.lists(NUMBERS, unique=True, max_size=40), max_size=8), st.lists(NUMBERS))
def test_as_a_dictionary(batches: list[list[int]], wanted: list[int]) -> None:
    index, places = RowIndex(), dict[int, int]()
    for batch in batches:
        found = index.add(torch.tensor(batch, dtype=torch.int64))
        for number in batch:
            places.setdefault(number, len(places))
        assert found.tolist() == [places[number] for number in batch]
    assert index.count == len(places)
    asked = torch.tensor(wanted, dtype=torch.int64)
    assert index.find(asked).tolist() == [places.get(number, -1) for number in wanted]
    assert index.numbers_at(0, 1000).tolist() == list(places)
    assert index.numbers_at(2, 3).tolist() == list(places)[2:5]


def test_it_grows() -> None:
    index = RowIndex()
    numbers = torch.randperm(10**6)[:100_000] * 1000
    for some in numbers.split(7000):
        index.add(some)
    assert index.find(numbers).tolist() == list(range(100_000))
    assert (index.find(numbers + 1) < 0).all()
