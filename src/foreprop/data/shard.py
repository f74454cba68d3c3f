"""This rank's share of a data set."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from foreprop.cluster.world import World, current_world, is_alone
from foreprop.data.divided import check_divided, pipeline_stages
from foreprop.data.draws import SharedOrder
from foreprop.data.loadercopy import Share, divide_loader
from foreprop.data.ordercheck import OrderCheck
from foreprop.data.shardedloader import ShardedIterator, ShardedLoader
from foreprop.data.sharedstream import SharedStream
from foreprop.data.turns import Turn
from foreprop.errors import ConfigError

L = TypeVar("L")


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
    if alone or isinstance(loader, ShardedLoader):
        return loader
    world = world or current_world()
    _check_kind(loader)
    kind = ShardedIterator if isinstance(loader, Iterator) else ShardedLoader
    if divided or check_divided(loader, world):
        return kind(loader, None, loader)
    shares, share = _divide(loader, Turn(rank=world.rank, size=world.size), seed)
    if isinstance(share, SharedOrder):
        share.check = OrderCheck(world, share.sampler)
    return kind(shares, share, loader)


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
