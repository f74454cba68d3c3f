"""This rank's share of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from foreprop.engine.world import World, current_world
from foreprop.errors import ConfigError
from foreprop.training.lookahead import lookahead

T = TypeVar("T")


class ShardedLoader:
    """Iterates over this rank's share; each pass is one epoch, and shuffles anew.

    Batches stay as large as the loader's: N ranks make an N-fold batch. All ranks get equally
    many batches; the last ones are filled up from the beginning, as DistributedSampler does.
    """

    def __init__(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> None:
        self._loader = loader
        self._sampler = sampler
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is; for resuming a run."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        return lookahead.follow(iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _ShardedBatches(Sampler[list[int]]):
    """Every world-th batch of somebody's own batch sampler; incomplete rounds are dropped."""

    def __init__(self, batches: Any, world: World) -> None:
        self._batches = batches
        self._world = world

    def __iter__(self) -> Iterator[list[int]]:
        mine: list[int] = []
        for number, batch in enumerate(self._batches):
            if number % self._world.size == self._world.rank:
                mine = batch
            if number % self._world.size == self._world.size - 1:
                yield mine

    def __len__(self) -> int:
        return len(self._batches) // self._world.size


def shard(
    loader: DataLoader[Any], *, seed: int = 0, world: World | None = None
) -> DataLoader[Any] | ShardedLoader:
    """This rank's share of ``loader``; the loader itself in a world of one.

    A loader that shuffles is shuffled anew in every pass, alike on all ranks, from ``seed``. The
    batches of a batch sampler of one's own are dealt out in turn, so it must make the same ones on
    every rank: let it draw from a generator of its own.
    Raises `ConfigError` for an iterable-style data set, which only its author can divide.
    """
    world = world or current_world()
    if world.size == 1:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "dataset is an IterableDataset, which cannot be divided from outside: yield every"
            " world_size-th item, starting at rank, in its __iter__"
        )
    batches = loader.batch_sampler
    if batches is None:
        raise ConfigError("batch_size is None: shard() needs a loader that makes batches")
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "persistent_workers",
        )
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    if type(batches) is not BatchSampler:
        return DataLoader(loader.dataset, batch_sampler=_ShardedBatches(batches, world), **options)
    _check_sampler(batches.sampler)
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=world.size,
        rank=world.rank,
        shuffle=isinstance(batches.sampler, RandomSampler),
        seed=seed,
        drop_last=False,
    )
    shares: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=batches.batch_size,
        sampler=sampler,
        drop_last=batches.drop_last,
        **options,
    )
    return ShardedLoader(shares, sampler)


def _check_sampler(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler):
        raise ConfigError("the loader has a DistributedSampler already; do not shard it again")
    if type(sampler) not in (RandomSampler, SequentialSampler):
        raise ConfigError(
            f"sampler is {type(sampler).__name__}; shard() divides random and sequential loaders."
            " Give it as batch_sampler, whose batches are dealt out to the ranks in turn"
        )
