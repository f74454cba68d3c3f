"""Whose turn it is: items dealt out to the ranks as torch's DistributedSampler does, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One rank's: every ``size``-th item, beginning with number ``rank``.

    If the last round is not complete and ``fill``, it is filled up with the first items, so that
    none is lost; else nobody gets an item of it. Either way all ranks get equally many.
    ``rounds`` are drawn at a time: as many items as a batch has.
    """

    rank: int
    size: int
    fill: bool = True
    rounds: int = 1

    def count(self, items: int) -> int:
        """Of so many items."""
        return -(-items // self.size) if self.fill else items // self.size

    def deal(self, items: Iterator[T], drawing: AbstractContextManager[object]) -> Iterator[T]:
        """This rank's items; they are drawn inside of ``drawing``, and given out outside."""
        first: list[T] = []
        ended = False
        while not ended:
            mine: list[T] = []
            with drawing:
                while len(mine) < self.rounds and not ended:
                    ended = self._draw_round(items, first, mine)
            yield from mine

    def _draw_round(self, items: Iterator[T], first: list[T], mine: list[T]) -> bool:
        """Appends to ``mine``; True at the end, which needs at most ``rank`` of the first items."""
        drawn = 0
        for item in islice(items, self.size):
            if drawn == self.rank:
                own = item
            if self.fill and len(first) < self.rank:
                first.append(item)
            drawn += 1
        if drawn > self.rank and (self.fill or drawn == self.size):
            mine.append(own)
        elif self.fill and drawn:
            mine.append(first[(self.rank - drawn) % len(first)])
        return drawn < self.size
