"""Which of very many rows have a place of their own, and which: a hash table of whole numbers.

Open addressing with linear probing, for many numbers at once. At most half full; about 50 bytes per
row that has a place, however far apart the rows are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_FREE = -1
_FIRST_SIZE_BITS = 10
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RowIndex:
    """Places are given in order of arrival, from 0 on. Not thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers = np.empty(2 ** (_FIRST_SIZE_BITS - 1), np.int64)  # by place
        self._resize(_FIRST_SIZE_BITS)

    def find(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows' places, or -1; int64."""
        wanted: Any = numbers.numpy()
        places = np.full(len(wanted), -1, np.int64)
        pending, at = np.arange(len(wanted)), self._home_of(wanted)
        while len(pending):
            seen = self._keys[at]
            hit = seen == wanted[pending]
            places[pending[hit]] = self._places[at[hit]]
            going = ~hit & (seen != _FREE)
            pending, at = pending[going], (at[going] + 1) & self._mask
        return torch.from_numpy(places)

    def add(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows' places, new ones for those that have none. No number may be there twice."""
        places = self.find(numbers)
        fresh: Any = numbers[places < 0].numpy()
        if len(fresh):
            given = np.arange(self.count, self.count + len(fresh))
            places[places < 0] = torch.from_numpy(given)
            self._make_room(self.count + len(fresh))
            self._numbers[given] = fresh
            self.count += len(fresh)
            self._insert(fresh, given)
        return places

    def numbers_at(self, first: int, limit: int) -> torch.Tensor:
        """The rows that have the places from ``first`` on."""
        return torch.from_numpy(self._numbers[first : min(first + limit, self.count)].copy())

    def _make_room(self, count: int) -> None:
        if count > len(self._numbers):
            bits = int(count).bit_length()
            larger = np.empty(2**bits, np.int64)
            larger[: self.count] = self._numbers[: self.count]
            self._numbers = larger
            self._resize(bits + 1)
            self._insert(larger[: self.count], np.arange(self.count))

    def _resize(self, bits: int) -> None:
        self._shift, self._mask = np.uint64(64 - bits), 2**bits - 1
        self._keys = np.full(2**bits, _FREE, np.int64)
        self._places = np.empty(2**bits, np.int64)

    def _insert(self, numbers: Any, places: Any) -> None:
        """None of them is there yet."""
        at = self._home_of(numbers)
        while len(numbers):
            free = self._keys[at] == _FREE
            self._keys[at[free]] = numbers[free]  # where several want to go, one gets there
            there = self._keys[at] == numbers
            self._places[at[there]] = places[there]
            rest = ~there
            numbers, places, at = numbers[rest], places[rest], (at[rest] + 1) & self._mask

    def _home_of(self, numbers: Any) -> Any:
        return ((numbers.astype(np.uint64) * _GOLDEN) >> self._shift).astype(np.int64)
