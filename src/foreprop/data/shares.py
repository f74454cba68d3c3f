"""This rank's share of what a sampler draws, or of what can only be read in order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

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
from foreprop.data.turns import CommonRandomness, OrderCheck, Turn

if TYPE_CHECKING:  # for sessions that go on without some workers
    from foreprop.data.redealing import DealtPass

_SEEDABLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_OF_TORCH = (*_SEEDABLE, SequentialSampler)
"""They draw from no other generator than their own."""


class SharedOrder(Sampler[Any]):
    """Every rank draws the whole order, alike, and keeps its turns. Each pass is an epoch.

    Random numbers come from ``seed`` and the epoch, unless the sampler has a generator of its own.
    """

    def __init__(self, sampler: Any, turn: Turn, seed: int) -> None:
        self.sampler = sampler
        self.epoch = 0
        """Which the next pass is."""
        self.drawn = False
        """Whether anybody has asked for the order."""
        self.turn = turn
        self._seed = seed
        self.check: OrderCheck | None = None
        self.dealing: DealtPass | None = None
        """Who deals the pass under way, if workers may leave in it."""
        self.parts: Sequence[DealtPart] = ()
        """What was read before of the pass that is about to begin, by other worlds."""
        self._world_rank = turn.rank

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is; told to the sampler, too, if it wants to know."""
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
        """From now on: the ranks that are left."""
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
    """With the generator that DistributedSampler would have in this epoch, if it has none."""
    if not isinstance(sampler, _SEEDABLE) or sampler.generator is not None:
        return sampler
    drawing = copy.copy(sampler)
    drawing.generator = torch.Generator().manual_seed(seed)
    return drawing


_WORKER_SEEDS = 1_000_003
"""A prime number of seeds between two workers of a loader."""


class SharedStream(IterableDataset[Any]):
    """Every rank reads all of ``source``, alike, and keeps its turns. Each pass is an epoch.

    In a loader's workers the source either divides itself among them, which is known from its
    asking how many there are, or every worker keeps its part of this rank's share.
    """

    drawn = True
    """Workers draw it, out of sight."""

    def __init__(self, source: Any, turn: Turn, seed: int) -> None:
        self.source = source
        self._turn = turn
        self._seed = seed
        self._upcoming = 0
        self._current: torch.Tensor = torch.zeros((), dtype=torch.int64)
        """The epoch under way."""

    def show_workers(self) -> None:
        """Also workers that stay from one epoch to the next will know it."""
        self._current.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """Which the next pass is."""
        return self._upcoming

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is; told to the source, too, if it wants to know."""
        self._upcoming = epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def begin_pass(self) -> None:
        """Another epoch, in the process that has the loader."""
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
        number, workers = _identity(worker)
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
    """What has been asked, in this worker of a loader, that one asks in order to divide data.

    A set that grows with every question; empty outside of workers.
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


def _identity(worker: Any) -> tuple[int, int]:
    """Number and number of workers, without having asked."""
    return object.__getattribute__(worker, "id"), object.__getattribute__(worker, "num_workers")
