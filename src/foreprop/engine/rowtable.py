"""A shard's rows, in memory that is taken as rows get values of their own."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

Make = Callable[[torch.Tensor], torch.Tensor]
"""Rows by their numbers in the shard, as they begin."""

_MAP_NORESERVE = 0x4000  # Linux's; the kernel is not asked to have memory for all of it
_LOOKED_AT = 1 << 20


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, of which a page takes memory once it is written to."""
    elems = torch.Size(shape).numel()
    if not elems:
        return torch.zeros(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, elems * dtype.itemsize, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # or a row could take two megabytes
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=elems).view(tuple(shape))


class RowTable:
    """Rows by number. Without ``make`` all are there; with it, those that have been `put`.

    Others are made anew whenever they are taken. Not thread-safe.
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
        self._kept = lazy_zeros((self.rows,), torch.bool) if self._make is not None else None

    @property
    def whole(self) -> torch.Tensor:
        """All rows, of a table that has them."""
        return self._values

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of these rows."""
        if self._make is None or self._kept is None:
            return self._values.index_select(0, numbers)
        kept = self._kept.index_select(0, numbers)
        if kept.all():
            return self._values.index_select(0, numbers)
        found = torch.empty(len(numbers), self.row_elems, dtype=self.dtype)
        found[kept] = self._values.index_select(0, numbers[kept])
        found[~kept] = self._make(numbers[~kept])
        return found

    def put(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        self._values.index_copy_(0, numbers, rows)
        if self._kept is not None:
            self._kept.index_fill_(0, numbers, True)

    def kept_from(self, first: int, limit: int) -> torch.Tensor:
        """The numbers of up to ``limit`` rows with values of their own, from ``first`` on."""
        if self._kept is None:
            return torch.arange(first, min(first + limit, self.rows))
        found, count = [torch.empty(0, dtype=torch.int64)], 0
        for start in range(first, self.rows, _LOOKED_AT):
            some = self._kept[start : start + _LOOKED_AT].nonzero()[:, 0] + start
            found.append(some)
            count += len(some)
            if count >= limit:
                break
        return torch.cat(found)[:limit]
