"""`foreprop.shard` of loaders with samplers of every kind, by lists of indices."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import foreprop
from foreprop.errors import ConfigError
from tests.cluster import worlds
from tests.conformance.matrices import few
from tests.conformance.shares import (
    epoch_of,
    flat,
    in_batches,
    interleaved,
    numbers,
    sharded,
    torchs_share,
)
from tests.tiers import long_cases

RANKS = pytest.mark.parametrize("ranks", [3, *long_cases(2, 4)])
SIZE = 23


@RANKS
@pytest.mark.parametrize(("shuffle", "workers"), few([False, True], [0, 2]))
def test_plain_loaders_give_what_distributed_sampler_gives(
    ranks: int, shuffle: bool, workers: int
) -> None:
    data = numbers(SIZE)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    loaders = sharded(lambda: DataLoader(data, shuffle=shuffle, **options), ranks, seed=3)
    for rank, loader in enumerate(loaders):
        sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=3)
        torchs = DataLoader(data, sampler=sampler, **options)
        assert len(loader) == len(torchs)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert epoch_of(loader) == epoch_of(torchs)


@given(
    size=st.integers(1, 40),
    ranks=st.integers(2, 5),
    batch=st.integers(1, 6),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_for_every_size(size: int, ranks: int, batch: int, shuffle: bool, drop_last: bool) -> None:
    data = numbers(size)
    options: dict[str, Any] = {"batch_size": batch, "drop_last": drop_last}
    for rank, loader in enumerate(
        sharded(lambda: DataLoader(data, shuffle=shuffle, **options), ranks)
    ):
        sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle)
        assert epoch_of(loader) == epoch_of(DataLoader(data, sampler=sampler, **options))


class Shuffled(Sampler[int]):
    """Draws from the global generators, as people's own samplers do."""

    def __init__(self, size: int, library: str) -> None:
        self._size = size
        self._library = library

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._size))
        if self._library == "random":
            random.shuffle(order)
        elif self._library == "numpy":
            np.random.shuffle(order)
        else:
            order = torch.randperm(self._size).tolist()
        for index in order:
            random.random()  # also between two
            yield index

    def __len__(self) -> int:
        return self._size


class Longest(BatchSampler):
    """Batches of its own, drawn at random."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(range(SIZE)), 4, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        batches = in_batches(list(self.sampler), self.batch_size)
        yield from sorted(batches, key=len)


SAMPLERS: dict[str, Any] = {
    "weighted": lambda: WeightedRandomSampler([0.1] * 10 + [0.9] * 13, 31),
    "subset": lambda: SubsetRandomSampler(range(5, 20)),
    "replacement": lambda: RandomSampler(range(SIZE), replacement=True),
    "fewer": lambda: RandomSampler(range(SIZE), num_samples=9),
    "more": lambda: RandomSampler(range(SIZE), replacement=True, num_samples=50),
    "torch": lambda: Shuffled(SIZE, "torch"),
    "numpy": lambda: Shuffled(SIZE, "numpy"),
    "random": lambda: Shuffled(SIZE, "random"),
    "list": lambda: [4, 2, 0, 4, 22],
}


def possible(kind: str, order: list[int]) -> bool:
    """Whether the sampler may have drawn this."""
    if kind in ("torch", "numpy", "random"):
        return sorted(order) == list(range(SIZE))
    lengths = {"weighted": 31, "subset": 15, "replacement": SIZE, "fewer": 9, "more": 50, "list": 5}
    once = kind not in ("subset", "fewer") or len(set(order)) == len(order)
    return once and len(order) == lengths[kind] and set(order) <= set(range(SIZE))


@RANKS
@pytest.mark.parametrize("workers", [0, *long_cases(2)])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_of_every_kind(ranks: int, workers: int, kind: str) -> None:
    loaders = sharded(
        lambda: DataLoader(
            numbers(SIZE), batch_size=4, sampler=SAMPLERS[kind](), num_workers=workers
        ),
        ranks,
    )
    length = len(SAMPLERS[kind]())
    orders = []
    for _ in range(2):
        shares = []
        for rank, loader in enumerate(loaders):  # the ranks' own numbers are not alike
            random.seed(rank)
            np.random.seed(rank)
            torch.manual_seed(rank)
            batches = epoch_of(loader)
            assert [len(batch) for batch in batches[:-1]] == [4] * (len(loader) - 1)
            shares.append(flat(batches))
        order = interleaved(shares)[:length]
        assert possible(kind, order)
        assert shares == [torchs_share(order, rank, ranks) for rank in range(ranks)]
        orders.append(order)
    assert kind == "list" or orders[0] != orders[1]


@RANKS
@pytest.mark.parametrize("workers", [0, *long_cases(2)])
def test_batches_of_ones_own_drawn_at_random(ranks: int, workers: int) -> None:
    loaders = sharded(
        lambda: DataLoader(numbers(SIZE), batch_sampler=Longest(), num_workers=workers), ranks
    )
    for _ in range(2):
        shares = []
        for rank, loader in enumerate(loaders):
            torch.manual_seed(rank)
            shares.append(epoch_of(loader))
            assert len(shares[-1]) == len(loader) == -(-6 // ranks)
        batches = [batch for round_ in zip(*shares, strict=True) for batch in round_]
        assert Counter(flat(batches[:6])) == Counter(range(SIZE))
        assert batches[6:] == batches[: len(batches) - 6]  # filled up from the beginning


@RANKS
@pytest.mark.parametrize("own", [RandomSampler, None])
def test_a_generator_of_ones_own_decides(ranks: int, own: Any) -> None:
    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(11)
        if own:
            sampler = own(range(SIZE), generator=generator)
            return DataLoader(numbers(SIZE), batch_size=4, sampler=sampler)
        return DataLoader(numbers(SIZE), batch_size=4, shuffle=True, generator=generator)

    loaders, plain = sharded(loader, ranks), loader()
    for _ in range(2):
        order = flat(epoch_of(plain))  # what one process without foreprop would have
        for rank, share in enumerate(loaders):
            assert flat(epoch_of(share)) == torchs_share(order, rank, ranks)


@RANKS
@pytest.mark.parametrize(("shuffle", "workers"), few([False, True], [0, 2]))
def test_without_batches(ranks: int, shuffle: bool, workers: int) -> None:
    data = numbers(SIZE)
    loaders = sharded(
        lambda: DataLoader(data, batch_size=None, shuffle=shuffle, num_workers=workers), ranks
    )
    for rank, loader in enumerate(loaders):
        sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle)
        assert flat(epoch_of(loader)) == list(sampler)


def test_without_batches_but_a_sampler_of_them() -> None:
    """As torch's documentation has it for data sets that read many samples at a time."""
    sampler = BatchSampler(RandomSampler(range(SIZE)), 4, drop_last=False)
    loaders = sharded(
        lambda: DataLoader(numbers(SIZE), batch_size=None, sampler=sampler),  # type: ignore[arg-type]
        2,
    )
    for rank, loader in enumerate(loaders):
        torchs = DistributedSampler(range(SIZE), 2, rank)  # type: ignore[arg-type]
        assert epoch_of(loader) == in_batches(list(torchs), 4)


def test_the_programs_random_numbers_are_not_touched() -> None:
    def after_an_epoch(loader: Any) -> tuple[float, float]:
        random.seed(1)
        np.random.seed(1)
        epoch_of(loader)
        return random.random(), float(np.random.rand())

    random.seed(1)
    np.random.seed(1)
    expected = random.random(), float(np.random.rand())
    for library in ("random", "numpy"):
        loader = DataLoader(numbers(SIZE), sampler=Shuffled(SIZE, library))
        (world, _) = worlds(2)
        assert after_an_epoch(foreprop.shard(loader, world=world)) == expected


class Endless(Sampler[int]):
    """Without a length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(5)


@RANKS
def test_an_endless_sampler(ranks: int) -> None:
    for rank, loader in enumerate(
        sharded(lambda: DataLoader(numbers(5), batch_size=2, sampler=Endless()), ranks)
    ):
        batches = iter(loader)
        found = flat([next(batches)[0].tolist() for _ in range(10)])
        assert found == [(rank + ranks * turn) % 5 for turn in range(20)]


@pytest.mark.parametrize("first", [0, 1])
def test_orders_that_are_not_alike_are_an_error(first: int) -> None:
    """Not whichever rank comes first: rank 1 says so at the next pass at the latest."""

    def loader(rank: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(rank)  # as people seed for DDP
        return DataLoader(numbers(SIZE), batch_size=4, shuffle=True, generator=generator)

    shares = [foreprop.shard(loader(world.rank), world=world) for world in worlds(2)]

    def two_passes() -> None:
        for rank in (first, 1 - first, first, 1 - first):
            epoch_of(shares[rank])

    with pytest.raises(ConfigError, match=r"RandomSampler draws another order on rank 1 .* seed="):
        two_passes()


def test_a_rank_may_look_at_a_batch_before() -> None:
    shares: list[Any] = sharded(lambda: DataLoader(numbers(SIZE), batch_size=4, shuffle=True), 2)
    next(iter(shares[0]))
    for epoch in range(2):
        for rank, share in enumerate(shares):
            share.set_epoch(epoch)
            sampler = DistributedSampler(numbers(SIZE), 2, rank)
            sampler.set_epoch(epoch)
            assert flat(epoch_of(share)) == list(sampler)


def test_data_of_unlike_lengths_is_an_error() -> None:
    shares = [
        foreprop.shard(DataLoader(numbers(90 + world.rank), batch_size=4), world=world)
        for world in worlds(2)
    ]
    epoch_of(shares[0])
    with pytest.raises(ConfigError, match=r"SequentialSampler .* of another length"):
        epoch_of(shares[1])


class TellsEpoch(Shuffled):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_samplers_are_told_the_epoch() -> None:
    sampler = TellsEpoch(SIZE, "torch")
    (world, _) = worlds(2)
    loader = foreprop.shard(DataLoader(numbers(SIZE), sampler=sampler), world=world)
    loader.set_epoch(4)  # type: ignore[union-attr]
    assert sampler.epoch == 4
    assert loader.epoch == 4  # type: ignore[union-attr]
