"""`foreprop.shard` keeps what a loader is: its class, its own `__iter__`, all its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import foreprop
from foreprop.errors import ConfigError
from tests.cluster import worlds
from tests.conformance.matrices import few
from tests.conformance.shares import epoch_of, flat, numbers, sharded
from tests.tiers import long_cases

SIZE = 23
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def collate(samples: list[Any]) -> torch.Tensor:
    return torch.stack([number for (number,) in samples])


def init(_worker: int) -> None:
    pass


KEPT: dict[str, Any] = {
    "batch_size": 4,
    "num_workers": 2,
    "collate_fn": collate,
    "pin_memory": False,
    "drop_last": True,
    "timeout": 30.0,
    "worker_init_fn": init,
    "generator": torch.Generator(),
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory_device": "cpu",
    "in_order": False,
}


@pytest.mark.parametrize("ready", [False, True])
def test_every_attribute_is_kept(ready: bool) -> None:
    loader = DataLoader(numbers(SIZE), multiprocessing_context="spawn", **KEPT)
    share: Any = foreprop.shard(loader, world=worlds(2)[0], divided=ready)
    for name, value in KEPT.items():
        assert getattr(share, name) is value, name
    assert share.multiprocessing_context is loader.multiprocessing_context
    assert share.dataset is loader.dataset


class Doubling(DataLoader[Any]):
    """An `__iter__` of its own, as of loaders that move batches to a device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.passes += 1
        for (batch,) in super().__iter__():
            yield batch * 2


@WORKERS
def test_a_subclass_keeps_its_iter(workers: int) -> None:
    loaders = sharded(lambda: Doubling(numbers(SIZE), batch_size=4, num_workers=workers), 3)
    for rank, loader in enumerate(loaders):
        sampler = DistributedSampler(range(SIZE), 3, rank, shuffle=False)  # type: ignore[arg-type]
        assert flat(epoch_of(loader)) == [2 * number for number in sampler]
        assert loader.passes == 1


class _RepeatSampler:
    """As in timm and in ultralytics."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader[Any]):
    """Its workers read on into the next epoch, from the moment that it is made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", _RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


@WORKERS
def test_a_loader_that_is_always_reading(workers: int) -> None:
    data = numbers(SIZE)
    loaders = sharded(lambda: MultiEpochs(data, batch_size=4, shuffle=True, num_workers=workers), 3)
    for rank, loader in enumerate(loaders):
        sampler = DistributedSampler(data, 3, rank)
        torchs = DataLoader(data, batch_size=4, sampler=sampler)
        assert len(loader) == len(torchs)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert epoch_of(loader) == epoch_of(torchs)


class Whole(DataLoader[Any]):
    """Reads its data set past its sampler."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from (torch.tensor([number, number + 1]) for number in range(0, 8, 2))


class Every(Whole):
    """As the message advises."""

    rank, world_size = 1, 2

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for number, batch in enumerate(super().__iter__()):
            if number % self.world_size == self.rank:
                yield batch


def test_one_that_reads_past_its_sampler_is_refused_with_advice_that_works() -> None:
    (_, world) = worlds(2)
    loader = foreprop.shard(Whole(numbers(8)), world=world)
    with pytest.raises(ConfigError, match=r"Whole.__iter__ .* divided=True"):
        next(iter(loader))
    share = foreprop.shard(Every(numbers(8)), world=world, divided=True)
    assert epoch_of(share) == [[2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("way", "workers"), few(["sampler", "batch_sampler", "subclass"], [0, *long_cases(2)])
)
def test_a_loader_with_a_distributed_sampler_is_taken_as_it_is(way: str, workers: int) -> None:
    class Weighted(DistributedSampler[Any]):
        pass

    data = numbers(SIZE)
    for world in worlds(3):
        kind = Weighted if way == "subclass" else DistributedSampler
        sampler: Any = kind(data, world.size, world.rank)
        options: dict[str, Any] = {"batch_size": 4, "sampler": sampler}
        if way == "batch_sampler":
            options = {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}
        loader = DataLoader(data, num_workers=workers, **options)
        share: Any = foreprop.shard(loader, world=world)
        for epoch in range(2):
            sampler.set_epoch(epoch)  # by the user, as ever
            assert epoch_of(share) == epoch_of(loader)
        share.set_epoch(5)
        assert sampler.epoch == 5


class Process:
    """How others call it: llm.c's loaders, and data sets that divide themselves."""

    def __init__(self, rank: int, size: int) -> None:
        self.process_rank, self.num_processes = rank, size

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([n] for n in range(self.process_rank, 9, self.num_processes))


def test_others_that_divide_themselves_are_taken_as_they_are() -> None:
    for world in worlds(3):
        share = foreprop.shard(Process(world.rank, 3), world=world)
        assert epoch_of(share) == [[world.rank], [world.rank + 3], [world.rank + 6]]
        assert epoch_of(share) == epoch_of(share)


def test_mosaics_and_lightnings_streams_are_taken_as_they_are() -> None:
    """They ask torchrun's variables for their share."""
    for package in ("streaming.base.dataset", "litdata.streaming.dataset"):
        kind = type("StreamingDataset", (IterableDataset,), {"__iter__": lambda _: iter([5])})
        kind.__module__ = package
        share: Any = foreprop.shard(DataLoader(kind()), world=worlds(2)[1])
        assert epoch_of(share) == [[5]]


def test_one_made_for_another_rank_is_refused_with_advice_that_works() -> None:
    data = numbers(8)
    (_, world) = worlds(2)
    for rank, size in [(0, 2), (1, 4), (2, 4)]:
        sampler = DistributedSampler(data, size, rank)
        found = rf"DistributedSampler divides the data for rank {rank} of {size}, .* rank 1 of 2"
        with pytest.raises(ConfigError, match=found):
            foreprop.shard(DataLoader(data, sampler=sampler), world=world)
        with pytest.raises(ConfigError, match="Process for rank 1 of 2"):
            foreprop.shard(Process(rank, size), world=world)
    left_out = foreprop.shard(DataLoader(data, shuffle=True), world=world)
    assert flat(epoch_of(left_out)) == list(DistributedSampler(data, 2, 1))


def test_one_made_for_one_process_is_divided() -> None:
    """What a script has that asks torch.distributed, which need not be there, and knows of one."""
    data = numbers(SIZE)
    for rank, world in enumerate(worlds(2)):
        alone: Any = DistributedSampler(data, 1, 0)
        share: Any = foreprop.shard(DataLoader(data, batch_size=4, sampler=alone), world=world)
        share.set_epoch(3)
        torchs = DistributedSampler(data, 2, rank)
        torchs.set_epoch(3)
        assert flat(epoch_of(share)) == list(torchs)


def test_samplers_in_disguise() -> None:
    """A batch sampler's own sampler may be the one that is divided."""

    class Grouped:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([index] for index in self.sampler)

    data = numbers(8)
    (_, world) = worlds(2)
    mine = Grouped(DistributedSampler(data, 2, 1, shuffle=False))
    share = foreprop.shard(DataLoader(data, batch_sampler=mine), world=world)  # type: ignore[arg-type]
    assert flat(epoch_of(share)) == [1, 3, 5, 7]
    whole = Grouped(SequentialSampler(range(8)))
    share = foreprop.shard(DataLoader(data, batch_sampler=whole), world=world)  # type: ignore[arg-type]
    assert flat(epoch_of(share)) == [1, 3, 5, 7]


def test_the_given_loader_is_left_as_it_was() -> None:
    batches = BatchSampler(RandomSampler(range(SIZE)), 4, drop_last=False)
    loader = DataLoader(numbers(SIZE), batch_sampler=batches)
    before = dict(vars(loader)), dict(vars(batches))
    epoch_of(foreprop.shard(loader, world=worlds(2)[0]))
    assert (vars(loader), vars(batches)) == before
