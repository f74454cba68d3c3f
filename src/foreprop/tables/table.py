"""A shard's rows, in memory that is taken as rows get values of their own."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from foreprop.tables.index import RowIndex

Make = Callable[[torch.Tensor], torch.Tensor]
"""Rows by their numbers in the shard, as they begin."""

_MAP_NORESERVE = 0x4000  # Linux's; the kernel is not asked to have memory for all of it


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
