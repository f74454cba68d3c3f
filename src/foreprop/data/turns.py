"""All ranks draw the same order, and each keeps its turns of it.

`Turn` deals items out as torch's DistributedSampler does, `CommonRandomness` has somebody's sampler
draw alike on every rank, and `OrderCheck` finds the ranks that draw another order all the same:
samples would be lost and repeated without a word.
"""

from __future__ import annotations

import os
import random
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from foreprop.cluster.world import World
from foreprop.errors import ConfigError, TransportError

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


# Random numbers, in whatever way somebody's sampler draws them.
_SEEDS = 2**32  # as many as numpy takes
_drawing = threading.RLock()


def _forget_lock() -> None:
    """A forked child would else wait for a thread that it does not have."""
    global _drawing  # noqa: PLW0603 - the process's
    _drawing = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


class CommonRandomness:
    """While entered, torch's, numpy's and Python's global generators draw from ``seed``.

    Entered again, they go on where they were left. Outside, nothing of it is seen. Costs about
    0.15 ms each time.
    """

    def __init__(self, seed: int) -> None:
        self._states: Any = _seeded(seed)
        self._outside: Any = None
        self._lock = _drawing

    def reseed(self, seed: int) -> None:
        """From now on; to be called outside."""
        self._states = _seeded(seed)

    def __enter__(self) -> CommonRandomness:
        self._lock = _drawing
        self._lock.acquire()
        self._outside = _states()
        _set_states(self._states)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._states = _states()
        _set_states(self._outside)
        self._lock.release()


def _seeded(seed: int) -> tuple[Any, Any, Any]:
    legacy = np.random.RandomState(seed % _SEEDS)  # what np.random.shuffle and its like draw from
    return (
        torch.Generator().manual_seed(seed).get_state(),
        legacy.get_state(legacy=False),
        random.Random(seed).getstate(),
    )


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


_COMPARED = 64  # of a pass: orders that differ do so early


class OrderCheck:
    """Compares the beginning of each pass with rank 0's, as soon as that is known: never waits."""

    def __init__(self, world: World, sampler: Any) -> None:
        self._world = world
        self._sampler = sampler
        self.number = world.next_loader()
        """Of the loader, by the order in which they are divided."""
        self._key = f"order/{self.number}"
        self._passes: Counter[int] = Counter()
        self._open: dict[str, bytes] = {}
        """By key: what is here in passes of which rank 0 has not told."""

    def watch(self, drawn: Iterator[Any], epoch: int) -> Iterator[Any]:
        """The same items. Raises `ConfigError` if rank 0 has drawn others."""
        key = f"{self._key}/{epoch}/{self._passes[epoch]}"  # some ranks look at a batch before
        self._passes[epoch] += 1
        digest, count = zlib.crc32(str(_maybe_length(self._sampler)).encode()), 0
        for item in drawn:
            if count < _COMPARED:
                digest = zlib.crc32(repr(item).encode(), digest)
            count += 1
            if count == _COMPARED:
                self._compare_digest(key, digest)
            yield item
        if count < _COMPARED:
            self._compare_digest(key, digest)
        self._compare()

    def _compare_digest(self, key: str, digest: int) -> None:
        if self._world.rank == 0:
            self._world.entries.set(key, str(digest))
            return
        self._open[key] = str(digest).encode()
        self._compare()

    def _compare(self) -> None:
        for key, here in list(self._open.items()):
            try:
                there = self._world.entries.maybe_get(key)
            except TransportError:  # rank 0 may be through with everything
                return
            if there is None:
                return
            del self._open[key]
            if there != here:
                raise ConfigError(
                    f"{type(self._sampler).__name__} draws another order on rank {self._world.rank}"
                    " than on rank 0, or of another length: give all ranks the same data, seed the"
                    " sampler's generator, and whatever else it draws from, alike on every rank, or"
                    " give it none, so that shard(loader, seed=...) decides"
                )


def _maybe_length(sampler: Any) -> int | None:
    return len(sampler) if hasattr(sampler, "__len__") else None
