"""This rank's share of a data set: somebody's loader, copied to read that only."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from foreprop.cluster.world import World, current_world, is_alone
from foreprop.data.divided import check_divided, pipeline_stages
from foreprop.data.shares import InitWorker, SharedOrder, SharedStream
from foreprop.data.turns import OrderCheck, Turn
from foreprop.errors import ConfigError
from foreprop.tables.lookahead import lookahead

if TYPE_CHECKING:  # for sessions that go on without some workers
    from foreprop.data.redealing import Redealing
    from foreprop.elastic.attendance import Attendance

L = TypeVar("L")
Share = SharedOrder | SharedStream


def shard(
    loader: L, *, seed: int = 0, world: World | None = None, divided: bool = False
) -> L | ShardedLoader:
    """This rank's share of ``loader``; the loader itself in a world of one.

    ``loader`` is a `DataLoader` of any kind, or any other iterable of batches. Batches stay as
    large as its own: N ranks make an N-fold batch. All ranks draw the same order, anew in every
    pass, from ``seed`` and the epoch or from the sampler's own generator, and keep every N-th
    sample (of one's own batch sampler, and of a plain iterable: batch), beginning with number rank.
    All get equally many: the last ones are filled up from the beginning, as DistributedSampler
    does; of batches that come ready-made in a stream, an incomplete last round is left out.
    What is divided already is taken as it is: a loader with a DistributedSampler or its like, or
    prepared by accelerate; ``divided=True`` says so of what does not show it. docs/data.md has all.

    Raises `ConfigError` for what cannot be divided, and what is divided for another rank.
    """
    alone = world.size == 1 if world is not None else is_alone()
    if isinstance(loader, ShardedLoader) or (alone and not _may_grow(world)):
        return loader
    world = world or current_world()
    _check_kind(loader)
    kind = ShardedIterator if isinstance(loader, Iterator) else ShardedLoader
    if divided or check_divided(loader, world):
        return kind(loader, None, loader, world)
    shares, share = _divide(loader, Turn(rank=world.rank, size=world.size), seed)
    if isinstance(share, SharedOrder):
        share.check = OrderCheck(world, share.sampler)
    return kind(shares, share, loader, world)


def _may_grow(world: World | None) -> bool:
    """Whether others may come to the session of this world of one."""
    elastic = sys.modules.get("foreprop.elastic.attendance")
    found = None if elastic is None else elastic.maybe_attendance(world or current_world())
    return found is not None and found.workers > 1


def _check_kind(loader: Any) -> None:
    ordered = isinstance(loader, IterableDataset) or not isinstance(loader, Dataset)
    if not ordered or not hasattr(loader, "__iter__"):
        raise ConfigError(
            f"loader is a {type(loader).__name__}: shard() takes a DataLoader, as in"
            " shard(DataLoader(dataset, batch_size=..., shuffle=True)), or an iterable of batches"
        )


def _divide(loader: Any, turn: Turn, seed: int) -> tuple[Any, Share]:
    if isinstance(loader, DataLoader):
        return divide_loader(loader, turn, seed)
    stages = pipeline_stages(loader)
    if stages and isinstance(stages[0], DataLoader):  # webdataset's WebLoader
        inner, share = divide_loader(stages[0], turn, seed)
        changed = copy.copy(loader)
        changed.pipeline = [inner, *stages[1:]]
        return changed, share
    stream = SharedStream(loader, replace(turn, fill=isinstance(loader, Sequence)), seed)
    return stream, stream


_OWN = frozenset({"_loader", "_share", "_original", "_world", "_redealing", "_batches", "epoch"})


class ShardedLoader:
    """Iterates over this rank's share; each pass is one epoch, and shuffles anew.

    Attributes are those of the loader that was given; setting one sets it there.
    """

    _redealing: Redealing | None = None

    def __init__(self, loader: Any, share: Share | None, original: Any, world: World) -> None:
        self._loader = loader
        self._share = share
        self._original = original
        self._world = world

    @property
    def epoch(self) -> int:
        """Which the next pass is; of a loader that was divided already, its sampler's.

        On a worker that has joined, first the one that the others read at its first step.
        """
        if (found := self._maybe_redealing()) is not None:
            found[0].catch_up(found[1])
        if self._share is not None:
            return self._share.epoch
        return int(getattr(getattr(self._loader, "sampler", None), "epoch", 0))

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is; for resuming a run."""
        if self._share is not None:
            self._share.set_epoch(epoch)
        batches = getattr(self._loader, "batch_sampler", None)
        told = [self._loader, batches, getattr(batches, "sampler", None)]
        told += [getattr(self._loader, name, None) for name in ("sampler", "dataset")]
        for owner in told:
            if owner is not self._share and hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._share, SharedStream):
            self._share.begin_pass()
        return lookahead.follow(self._checked(self._pass()))

    def _pass(self) -> Iterator[Any]:
        """Dealt anew when workers leave, if there is a session that goes on then."""
        found = self._maybe_redealing()
        return iter(self._loader) if found is None else found[0].passed(self._loader, found[1])

    def _maybe_redealing(self) -> tuple[Redealing, Attendance] | None:
        elastic = sys.modules.get("foreprop.elastic.attendance")  # no other session loads it
        attendance = None if elastic is None else elastic.maybe_attendance(self._world)
        if attendance is None:
            return None
        if self._redealing is None:
            from foreprop.data.redealing import Redealing

            name = type(self._original).__name__
            self._redealing = Redealing(self._share, self._world, name)
        return self._redealing, attendance

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Raises `ConfigError` at the first batch of a loader that has not asked for its share."""
        for batch in batches:
            if self._share is not None and not self._share.drawn:
                raise ConfigError(
                    f"{type(self._original).__name__}.__iter__ reads neither its sampler nor its"
                    " batch_sampler, so shard() cannot divide it: let it take every world_size-th"
                    " batch, beginning with number rank, and say shard(loader, divided=True)"
                )
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        where = self._original if name in ("dataset", "worker_init_fn") else self._loader
        return getattr(where, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


class ShardedIterator(ShardedLoader):
    """Of a generator's result: there is one pass, which goes on where it was left."""

    _batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = super().__iter__()
        return next(self._batches)


# Copies of loaders with another sampler or data set: of the same class, with all else.
def divide_loader(loader: Any, turn: Turn, seed: int) -> tuple[Any, Share]:
    """A copy of ``loader`` that reads one rank's share, and that share."""
    if "base_dataloader" in vars(loader):  # accelerate's, which hold the loader that they prepare
        base, share = divide_loader(loader.base_dataloader, turn, seed)
        return _changed(loader, base_dataloader=base), share
    if isinstance(loader.dataset, IterableDataset):
        return _divide_stream(loader, turn, seed)
    if loader.batch_sampler is None:
        sampler, share = _divide_batches(loader.sampler, turn, seed)
        return _restarted(_changed(loader, sampler=sampler)), share
    batches, share = _divide_batches(loader.batch_sampler, turn, seed)
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    return _restarted(_changed(loader, batch_sampler=batches, sampler=sampler)), share


def _divide_stream(loader: Any, turn: Turn, seed: int) -> tuple[Any, Share]:
    """Made batches (``batch_size=None``) are not filled up: nobody knows how large they are."""
    batched = loader.batch_size is not None
    turn = replace(turn, fill=batched, rounds=loader.batch_size or 1)
    share = SharedStream(loader.dataset, turn, seed)
    if loader.num_workers:
        share.show_workers()
    changes: dict[str, Any] = {"dataset": share}
    if loader.worker_init_fn is not None:
        changes["worker_init_fn"] = InitWorker(loader.worker_init_fn)
    return _restarted(_changed(loader, **changes)), share


def _divide_batches(batches: Any, turn: Turn, seed: int) -> tuple[Any, SharedOrder]:
    """Torch's own batches are of divided samples; those of others are dealt out whole."""
    inner = getattr(batches, "sampler", None)
    if type(batches) is BatchSampler:
        share = SharedOrder(inner, replace(turn, rounds=batches.batch_size), seed)
        return _changed(batches, sampler=share), share
    if isinstance(inner, BatchSampler) and not isinstance(batches, BatchSampler):
        inner, share = _divide_batches(inner, turn, seed)  # repeats it for ever, as timm's does
        return _changed(batches, sampler=inner), share
    share = SharedOrder(batches, turn, seed)
    return share, share


def _changed(original: Any, **changes: Any) -> Any:
    """A copy, past the loader's own refusal of new values."""
    changed = copy.copy(original)
    vars(changed).update(changes)
    return changed


def _restarted(loader: Any) -> Any:
    """Iterators that the original's constructor has begun read the undivided data: begin anew."""
    begun = [name for name, value in vars(loader).items() if isinstance(value, _BaseDataLoaderIter)]
    vars(loader)["_iterator"] = None
    for name in begun:
        if name != "_iterator":
            vars(loader)[name] = DataLoader.__iter__(loader)
    return loader
