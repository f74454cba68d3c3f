"""This rank's share of a data set: somebody's loader, copied to read that only.

A copy is of the same class, with another sampler or data set and all else. What is divided already
is recognised by the marks that samplers and data sets of others bear: a rank and a number of ranks.
Webdataset pipelines shuffle by generators that nobody can seed, so only they can divide their
files. Passes are dealt anew when workers leave, where a session goes on then (`session.redealing`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from foreprop.engine.world import World, current_world, is_alone
from foreprop.errors import ConfigError
from foreprop.features.tables.lookahead import lookahead
from foreprop.session.shares import InitWorker, OrderCheck, SharedOrder, SharedStream, Turn

if TYPE_CHECKING:  # for sessions that go on without some workers
    from foreprop.features.members.membershipview import MembershipView
    from foreprop.session.redealing import Redealing

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
    prepared by accelerate; ``divided=True`` says so of what does not show it.
    docs/semantics.md has all.

    Raises `ConfigError` for what cannot be divided, and what is divided for another rank.
    """
    alone = world.size == 1 if world is not None else is_alone()
    if isinstance(loader, ShardedLoader):
        return loader
    if alone:  # unless others may come to the session of this world of one
        view = _maybe_view(world or current_world())
        if view is None or view.workers <= 1:
            return loader
    world = world or current_world()
    ordered = isinstance(loader, IterableDataset) or not isinstance(loader, Dataset)
    if not ordered or not hasattr(loader, "__iter__"):
        raise ConfigError(
            f"loader is a {type(loader).__name__}: shard() takes a DataLoader, as in"
            " shard(DataLoader(dataset, batch_size=..., shuffle=True)), or an iterable of batches"
        )
    kind = ShardedIterator if isinstance(loader, Iterator) else ShardedLoader
    if divided or check_divided(loader, world):
        return kind(loader, None, loader, world)
    shares, share = _divide(loader, Turn(rank=world.rank, size=world.size), seed)
    if isinstance(share, SharedOrder):
        share.check = OrderCheck(world, share.sampler)
    return kind(shares, share, loader, world)


def _maybe_view(world: World) -> MembershipView | None:
    # only an elastic session loads it
    elastic = sys.modules.get("foreprop.features.members.membershipview")
    view: MembershipView | None = None if elastic is None else elastic.maybe_view(world)
    return view


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
        """The number of the next pass; of a loader that was divided already, its sampler's.

        On a worker that has joined it begins with that of the others' pass at its first step.
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
        """Have the next pass be this epoch; for resuming a run."""
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
        found = self._maybe_redealing()
        if found is None:
            batches = iter(self._loader)
        else:
            redealing, view = found
            batches = redealing.passed(self._loader, view)
        return lookahead.follow(self._checked(batches))

    def _maybe_redealing(self) -> tuple[Redealing, MembershipView] | None:
        view = _maybe_view(self._world)
        if view is None:
            return None
        if self._redealing is None:
            from foreprop.session.redealing import Redealing

            name = type(self._original).__name__
            self._redealing = Redealing(self._share, self._world, name)
        return self._redealing, view

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
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
    """A generator's result: there is one pass, which goes on where it was left."""

    _batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = super().__iter__()
        return next(self._batches)


# The copies.
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
    batched = loader.batch_size is not None  # else they come as large as they are, not filled up
    turn = replace(turn, fill=batched, rounds=loader.batch_size or 1)
    share = SharedStream(loader.dataset, turn, seed)
    if loader.num_workers:
        share.show_workers()
    changes: dict[str, Any] = {"dataset": share}
    if loader.worker_init_fn is not None:
        changes["worker_init_fn"] = InitWorker(loader.worker_init_fn)
    return _restarted(_changed(loader, **changes)), share


def _divide_batches(batches: Any, turn: Turn, seed: int) -> tuple[Any, SharedOrder]:
    # torch's own batches are of divided samples; those of others are dealt out whole
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
    changed = copy.copy(original)
    vars(changed).update(changes)
    return changed


def _restarted(loader: Any) -> Any:
    # iterators that the original's constructor has begun read the undivided data: begin anew
    begun = [name for name, value in vars(loader).items() if isinstance(value, _BaseDataLoaderIter)]
    loader._iterator = None
    for name in begun:
        if name != "_iterator":
            setattr(loader, name, DataLoader.__iter__(loader))
    return loader


# Marks of what is divided already.
_RANKS = ("rank", "_rank", "process_index", "process_rank")
_SIZES = ("num_replicas", "_num_replicas", "world_size", "_world_size", "num_processes")

_STREAMING = ("streaming", "litdata")
"""Packages whose Streaming... classes ask torchrun's variables for their share."""


@dataclass(frozen=True, slots=True)
class _Division:
    """A division by somebody else; ``make`` says how to make it for another rank."""

    owner: str
    rank: int
    size: int
    make: str


def check_divided(source: Any, world: World) -> bool:
    """Whether ``source`` gives every rank its own share already.

    Raises `ConfigError` if it does, but for another rank or number of ranks than this world's, and
    for webdataset pipelines that are not divided by node.
    """
    for found in _divisions(source):
        if (found.rank, found.size) != (world.rank, world.size):
            raise ConfigError(
                f"{found.owner} divides the data for rank {found.rank} of {found.size}, but this is"
                f" rank {world.rank} of {world.size}: "
                + found.make.format(rank=world.rank, size=world.size)
            )
        return True
    kind = type(getattr(source, "dataset", source))
    return kind.__name__.startswith("Streaming") and kind.__module__.split(".")[0] in _STREAMING


def _divisions(source: Any) -> Iterator[_Division]:
    yield from _accelerated(source)
    for part in _parts(source):
        rank, size = _first_int(part, _RANKS), _first_int(part, _SIZES)
        if rank is not None and size is not None and size > 1:  # for one is not divided yet
            make = (
                f"make {type(part).__name__} for rank {{rank}} of {{size}}, or leave it out and"
                " give shard() what it divides"
            )
            yield _Division(type(part).__name__, rank, size, make)
        node = vars(part).get("_distributed") if hasattr(part, "__dict__") else None
        if node is not None and node.world_size > 1:  # Hugging Face's
            make = "say split_dataset_by_node(dataset, rank={rank}, world_size={size})"
            yield _Division("split_dataset_by_node", node.rank, node.world_size, make)
    yield from _webdataset(source)


def _parts(source: Any) -> Iterator[Any]:
    # samplers, and data sets that are read in order
    names = ("sampler", "batch_sampler")
    samplers = [getattr(source, name, None) for name in names]
    inner = [getattr(part, name, None) for part in samplers for name in names]
    dataset = getattr(source, "dataset", None)
    datasets = [dataset, getattr(dataset, "dataset", None)]
    streams = [part for part in datasets if isinstance(part, IterableDataset)]
    for part in (source, *samplers, *inner, *streams):
        if part is not None and type(part) is not BatchSampler:
            yield part


def _first_int(part: Any, names: tuple[str, ...]) -> int | None:
    values = vars(part) if hasattr(part, "__dict__") else {}
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)


def _accelerated(source: Any) -> Iterator[_Division]:
    # accelerate divides whatever it prepares, if it knows of several processes
    if type(source).__module__.startswith("accelerate."):
        state = sys.modules["accelerate"].PartialState()
        if state.num_processes > 1:
            make = "start accelerate and foreprop with the same ranks, as torchrun does"
            yield _Division("accelerate", state.process_index, state.num_processes, make)


def _webdataset(source: Any) -> Iterator[_Division]:
    stages = pipeline_stages(source) or pipeline_stages(getattr(source, "dataset", None))
    if not stages:
        return
    if isinstance(stages[0], DataLoader):  # a WebLoader
        yield from _divisions(stages[0])
        return
    library = sys.modules["webdataset"]
    own = library.split_by_node in stages or isinstance(stages[0], library.ResampledShards)
    if not own or library.single_node_only in stages:
        raise ConfigError(
            "this webdataset pipeline does not divide its files among the ranks: give WebDataset"
            " nodesplitter=webdataset.split_by_node, and .with_epoch(n) so that every rank makes"
            " n steps; if it does divide them, say shard(loader, divided=True)"
        )
    rank, size, _, _ = library.utils.pytorch_worker_info()
    make = "set RANK={rank} and WORLD_SIZE={size}, as torchrun does"
    yield _Division("webdataset.split_by_node", rank, size, make)


def pipeline_stages(source: Any) -> list[Any]:
    """A webdataset pipeline's; none of anything else."""
    library = sys.modules.get("webdataset")
    if library is None or not isinstance(source, library.DataPipeline):
        return []
    stages: list[Any] = source.pipeline
    return stages
