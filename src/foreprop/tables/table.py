"""A shard's rows, in memory that is taken as rows get values of their own.

Of a remote table, all other rows are made from their numbers whenever they are wanted, not drawn
one after another. A counter goes through SplitMix64's mixing function (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014), and Box and Muller's transformation makes normal
numbers of the bits. Each number depends on its place alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from foreprop.core.manifest import RowInit

Make = Callable[[torch.Tensor], torch.Tensor]
"""Rows by their numbers in the shard, as they begin."""

_MAP_NORESERVE = 0x4000  # Linux's; the kernel is not asked to have memory for all of it
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FREE = -1
_FIRST_SIZE_BITS = 10
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_SCALE = 2.0**-32
_MADE_AT_ONCE_ELEMS = 65_536
"""Few enough for the cache; the numbers in between take eight times as much."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, of which a page takes memory once it is written to."""
    elems = torch.Size(shape).numel()
    if not elems:
        return torch.zeros(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, elems * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=elems).view(tuple(shape))


class RowTable:
    """Rows by number. Without ``make`` all are there; with it, those that have been kept.

    Others are made anew whenever they are taken. What belongs to a row lies at its *place*: without
    ``make`` that is its number; with it, places are given as rows come, so that rows far apart are
    neighbours in memory. Not thread-safe.
    """

    def __init__(
        self, rows: int, row_elems: int, dtype: torch.dtype, make: Make | None = None
    ) -> None:
        self.rows = rows
        self.row_elems = row_elems
        self.dtype = dtype
        self._make = make
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._values = lazy_zeros((self.rows, self.row_elems), self.dtype)
        self._index = RowIndex() if self._make is not None else None

    @property
    def whole(self) -> torch.Tensor:
        """All rows, of a table that has them."""
        return self._values

    def places(self, numbers: torch.Tensor) -> torch.Tensor:
        """Where the rows are, or -1."""
        return numbers if self._index is None else self._index.find(numbers)

    def keep(self, numbers: torch.Tensor) -> torch.Tensor:
        """From now on these rows are kept; returns their places."""
        if self._make is None or self._index is None:
            return numbers
        fresh = numbers[self._index.find(numbers) < 0]
        places = self._index.add(numbers)
        if len(fresh):
            self._values.index_copy_(0, self._index.find(fresh), self._make(fresh))
        return places

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of these rows."""
        places = self.places(numbers)
        kept = places >= 0
        if self._make is None or kept.all():
            return self._values.index_select(0, places)
        found = torch.empty(len(numbers), self.row_elems, dtype=self.dtype)
        found[kept] = self._values.index_select(0, places[kept])
        found[~kept] = self._make(numbers[~kept])
        return found

    def put(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep these rows, with these values."""
        places = numbers if self._index is None else self._index.add(numbers)
        self._values.index_copy_(0, places, rows)

    def kept_at(self, first: int, limit: int) -> torch.Tensor:
        """Up to ``limit`` rows that are kept, from the place ``first`` on; ascending."""
        if self._index is None:
            return torch.arange(first, min(first + limit, self.rows))
        return self._index.numbers_at(first, limit).sort().values


class RowIndex:
    """Which of very many rows have a place of their own, and which: a hash table of whole numbers.

    Open addressing with linear probing, for many numbers at once. At most half full; about 50 bytes
    per row that has a place, however far apart the rows are. Places are given in order of arrival,
    from 0 on. Not thread-safe.
    """

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


# Rows as they begin.
def make_rows(
    init: RowInit, numbers: torch.Tensor, row_elems: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows ``numbers`` (int64, of the whole table) as they begin: (len(numbers), row_elems)."""
    made = torch.empty(len(numbers), row_elems, dtype=dtype)
    at_once = max(1, _MADE_AT_ONCE_ELEMS // max(1, row_elems))
    for some, rows in zip(torch.split(numbers, at_once), torch.split(made, at_once), strict=True):
        rows.copy_(torch.from_numpy(_made_values(init, some.numpy(), row_elems)))
    if init.padding_row is not None:
        made[numbers == init.padding_row] = 0
    return made


def _made_values(init: RowInit, numbers: Any, row_elems: int) -> Any:
    if init.distribution == "constant":
        return np.full((len(numbers), row_elems), init.first)
    bits = _random_bits(init.key, numbers, row_elems)
    high, low = (bits >> _HALF) + 0.5, (bits & _LOW).astype(np.float64)
    if init.distribution == "uniform":
        return init.first + (init.second - init.first) * (high * _SCALE)
    normal = np.sqrt(-2 * np.log(high * _SCALE)) * np.cos(2 * np.pi * (low * _SCALE))
    return init.first + init.second * normal


def _random_bits(key: int, numbers: Any, row_elems: int) -> Any:
    """64 of them for each element."""
    places = numbers.astype(np.uint64)[:, None] * np.uint64(row_elems)
    mixed = (places + np.arange(row_elems, dtype=np.uint64)) * _GOLDEN + np.uint64(key)
    for shift, factor in zip(_SHIFTS, _MIX, strict=False):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> _SHIFTS[-1])
