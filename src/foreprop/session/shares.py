"""This rank's share of what all ranks draw in the same order.

`Turn` deals items out as torch's DistributedSampler does, `CommonRandomness` has somebody's sampler
draw alike on every rank, and `OrderCheck` finds the ranks that draw another order all the same:
samples would be lost and repeated without a word. `SharedOrder` is the share of what a sampler
draws, and `SharedStream` of what can only be read in order. Each pass over one is an epoch.

In a loader's workers a stream either divides itself among them, or every worker keeps its part of
this rank's share. Which it is shows in whether the stream has asked how many workers there are, so
its questions are noted (`note_questions`).
"""

from __future__ import annotations

import copy
import os
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from foreprop.core.dealing import DealtPart, unread
from foreprop.engine.world import World
from foreprop.errors import ConfigError, TransportError

T = TypeVar("T")


class Dealing:
    """How the items of a pass are divided: always alike (`Turn`), or anew when workers leave."""

    begun = False
    """Whether the order is being drawn; a loader that begins again goes on with it then."""

    def count(self, items: int) -> int:
        """How many of so many items this rank gets."""
        raise NotImplementedError

    def deal(self, items: Iterator[T], drawing: AbstractContextManager[object]) -> Iterator[T]:
        """This rank's items; they are drawn inside of ``drawing``, and given out outside."""
        raise NotImplementedError

    def rest(self) -> Iterator[Any]:
        """What is left of the order that is being drawn."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Dealing):
    """One rank's share of a sequence: every ``size``-th item, beginning with number ``rank``.

    With ``fill`` an incomplete last round is filled up with the first items, so that none is lost;
    else nobody gets an item of it. Either way all ranks get equally many. ``rounds`` are drawn at a
    time: as many items as a batch has.
    """

    rank: int
    size: int
    fill: bool = True
    rounds: int = 1

    def count(self, items: int) -> int:
        return -(-items // self.size) if self.fill else items // self.size

    def deal(self, items: Iterator[T], drawing: AbstractContextManager[object]) -> Iterator[T]:
        first: list[T] = []
        ended = False
        while not ended:
            mine: list[T] = []
            with drawing:
                while len(mine) < self.rounds and not ended:
                    ended = self._draw_round(items, first, mine)
            yield from mine

    def _draw_round(self, items: Iterator[T], first: list[T], mine: list[T]) -> bool:
        # True at the end, which needs at most ``rank`` of the first items
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
    # a forked child would wait for a thread that it does not have
    global _drawing  # noqa: PLW0603 - the process's
    _drawing = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


class CommonRandomness:
    """While entered, torch's, numpy's and Python's global generators draw from ``seed``.

    Entered again, they go on where they were left. Nothing of it is seen outside. Each time costs
    about 0.15 ms.
    """

    def __init__(self, seed: int) -> None:
        self.reseed(seed)
        self._outside: Any = None
        self._lock = _drawing

    def reseed(self, seed: int) -> None:
        """Draw from this seed from now on; to be called outside."""
        legacy = np.random.RandomState(seed % _SEEDS)  # what np.random.shuffle and its like draw
        self._states: tuple[Any, Any, Any] = (
            torch.Generator().manual_seed(seed).get_state(),
            legacy.get_state(legacy=False),
            random.Random(seed).getstate(),
        )

    def __enter__(self) -> CommonRandomness:
        self._lock = _drawing
        self._lock.acquire()
        self._outside = _states()
        _set_states(self._states)
        return self

    def __exit__(self, *_: object) -> None:
        self._states = _states()
        _set_states(self._outside)
        self._lock.release()


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
        self.number = world.next_loader()  # by the order in which loaders are divided
        self._key = f"order/{self.number}"
        self._passes: Counter[int] = Counter()
        self._open: dict[str, bytes] = {}
        """This rank's digests of passes of which rank 0's is not known, by key."""

    def watch(self, drawn: Iterator[Any], epoch: int) -> Iterator[Any]:
        """The same items. Raises `ConfigError` if rank 0 has drawn others."""
        key = f"{self._key}/{epoch}/{self._passes[epoch]}"  # some ranks look at a batch before
        self._passes[epoch] += 1
        length = len(self._sampler) if hasattr(self._sampler, "__len__") else None
        digest, count = zlib.crc32(str(length).encode()), 0
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


# The shares.
_SEEDABLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_OF_TORCH = (*_SEEDABLE, SequentialSampler)
"""Samplers that draw from no other generator than their own."""


class SharedOrder(Sampler[Any]):
    """A sampler's order, which every rank draws as a whole, and of which each keeps its turns.

    Random numbers come from ``seed`` and the epoch, unless the sampler has a generator of its own.
    """

    def __init__(self, sampler: Any, turn: Turn, seed: int) -> None:
        self.sampler = sampler
        self.epoch = 0  # the next pass
        self.drawn = False  # whether anybody has asked for the order
        self.turn = turn
        self._seed = seed
        self.check: OrderCheck | None = None
        self.dealing: Dealing | None = None
        """What deals the pass under way, if workers may leave in it."""
        self.parts: Sequence[DealtPart] = ()
        """What other worlds have read of the pass that is about to begin."""
        self._world_rank = turn.rank

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be this epoch, for the sampler, too."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        dealing = self.dealing
        if dealing is not None and dealing.begun:
            yield from dealing.rest()
            return
        epoch, self.epoch = self.epoch, self.epoch + 1
        seed = self._seed + epoch
        self.drawn = True
        drawing: AbstractContextManager[object] = nullcontext()
        if type(self.sampler) not in _OF_TORCH:
            drawing = CommonRandomness(seed)
        with drawing:
            drawn = iter(_seeded(self.sampler, seed))
        if self.check is not None:
            drawn = self.check.watch(drawn, epoch)
        parts, self.parts = self.parts, ()
        for part in parts:
            drawn = unread(part, drawn)
        yield from (self.turn if dealing is None else dealing).deal(drawn, drawing)

    def divide_among(self, members: Sequence[int]) -> None:
        """Divide from now on among the ranks that are left."""
        if self._world_rank in members:
            place = members.index(self._world_rank)
            self.turn = replace(self.turn, rank=place, size=len(members))

    def __len__(self) -> int:
        items = len(self.sampler)
        return self.turn.count(items) if self.dealing is None else self.dealing.count(items)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "sampler" not in vars(self):
            raise AttributeError(name)
        return getattr(self.sampler, name)


def _seeded(sampler: Any, seed: int) -> Any:
    # a sampler without a generator gets the one that DistributedSampler would have now
    if not isinstance(sampler, _SEEDABLE) or sampler.generator is not None:
        return sampler
    drawing = copy.copy(sampler)
    drawing.generator = torch.Generator().manual_seed(seed)
    return drawing


_WORKER_SEEDS = 1_000_003
"""A prime number of seeds between two workers of a loader."""


class SharedStream(IterableDataset[Any]):
    """A stream, which every rank reads as a whole, and of which each keeps its turns."""

    drawn = True  # workers draw it, out of sight

    def __init__(self, source: Any, turn: Turn, seed: int) -> None:
        self.source = source
        self._turn = turn
        self._seed = seed
        self._upcoming = 0
        self._current: torch.Tensor = torch.zeros((), dtype=torch.int64)  # the epoch under way

    def show_workers(self) -> None:
        """Let workers that stay from one epoch to the next know the epoch."""
        self._current.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        return self._upcoming

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be this epoch, for the source, too."""
        self._upcoming = epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def begin_pass(self) -> None:
        """Begin the next epoch, in the process that has the loader."""
        self._current.fill_(self._upcoming)
        self._upcoming += 1

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.source, list):  # in order, and there already
            return self._turn.deal(iter(self.source), nullcontext())
        seed = self._seed + int(self._current)
        common = CommonRandomness(seed)
        worker = get_worker_info()
        asked = note_questions()
        with common:
            items = iter(self.source)
            beginning = list(islice(items, 1))
        share = self._turn.deal(chain(beginning, items), common)
        if worker is None:
            return share
        ask = partial(object.__getattribute__, worker)  # without its being noted
        number, workers = ask("id"), ask("num_workers")
        if not asked:
            return islice(share, number, None, workers)
        common.reseed(seed + _WORKER_SEEDS * number)  # other crops and flips than its neighbours'
        return share

    def __len__(self) -> int:
        return self._turn.count(len(self.source))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "source" not in vars(self):
            raise AttributeError(name)
        return getattr(self.source, name)


class InitWorker:
    """A loader's own ``worker_init_fn``, which sees its own data set and may divide it."""

    def __init__(self, init: Callable[[int], None]) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        if isinstance(info.dataset, SharedStream):
            object.__setattr__(info, "dataset", info.dataset.source)
        note_questions()
        self.init(worker)


def note_questions() -> set[str]:
    """The questions that were asked in this loader's worker in order to divide data.

    The set grows with every question; it is empty outside of workers.
    """
    info = get_worker_info()
    if info is None:
        return set()
    if not hasattr(type(info), "foreprop_asked"):
        object.__setattr__(info, "__class__", _noting(type(info)))
    asked: set[str] = type(info).foreprop_asked  # type: ignore[attr-defined]
    return asked


def _noting(kind: type) -> type:
    asked: set[str] = set()

    def look_up(self: Any, name: str) -> Any:
        if name in ("num_workers", "dataset"):
            asked.add(name)
        return object.__getattribute__(self, name)

    members = {"__slots__": (), "__getattribute__": look_up, "foreprop_asked": asked}
    return type(kind.__name__, (kind,), members)
