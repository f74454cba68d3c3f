"""`foreprop.shard`: this rank's share of a data set."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

import foreprop
from foreprop.errors import ConfigError
from tests.cluster import worlds
from tests.conformance.parity import build_seeded, make_batches, train_classifier, with_sgd
from tests.tiers import long_cases


def _numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def _shards(size: int, ranks: int, **options: Any) -> list[Any]:
    options = {"batch_size": 4, **options}
    return [
        foreprop.shard(DataLoader(_numbers(size), **options), world=world)
        for world in worlds(ranks)
    ]


def _epoch(loader: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


def _flat(batches: list[list[int]]) -> list[int]:
    return [item for batch in batches for item in batch]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_are_disjoint_and_cover_the_set(ranks: int, shuffle: bool) -> None:
    shares = [_epoch(loader) for loader in _shards(48, ranks, shuffle=shuffle)]
    assert Counter(_flat([_flat(share) for share in shares])) == Counter(range(48))
    assert {len(share) for share in shares} == {48 // ranks // 4}
    assert all(len(batch) == 4 for share in shares for batch in share)  # as large as the loader's


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [5, 13, 47])
def test_uneven_sizes_give_equal_numbers_of_batches(
    size: int, shuffle: bool, drop_last: bool
) -> None:
    loaders = _shards(size, 3, shuffle=shuffle, drop_last=drop_last)
    shares = [_epoch(loader) for loader in loaders]
    each = math.ceil(size / 3)
    expected = each // 4 if drop_last else math.ceil(each / 4)
    assert [len(share) for share in shares] == [len(loader) for loader in loaders] == [expected] * 3
    if not drop_last:
        assert set(_flat([_flat(share) for share in shares])) == set(range(size))


def test_epochs_reshuffle_alike_on_all_ranks() -> None:
    loaders = _shards(24, 2, shuffle=True)
    epochs = [[_flat(_epoch(loader)) for loader in loaders] for _ in range(3)]
    for shares in epochs:
        assert sorted(shares[0] + shares[1]) == list(range(24))
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffling_every_epoch_is_the_same() -> None:
    loader = _shards(24, 2)[1]
    assert _epoch(loader) == _epoch(loader)


def test_set_epoch_resumes() -> None:
    whole = _shards(24, 2, shuffle=True)[1]
    epochs = [_epoch(whole) for _ in range(4)]
    resumed = _shards(24, 2, shuffle=True)[1]
    resumed.set_epoch(2)
    assert [_epoch(resumed) for _ in range(2)] == epochs[2:]
    assert resumed.epoch == whole.epoch == 4


def test_the_seed_decides() -> None:
    def epoch(seed: int) -> list[list[int]]:
        loader = DataLoader(_numbers(24), batch_size=4, shuffle=True)
        return _epoch(foreprop.shard(loader, seed=seed, world=worlds(2)[0]))

    assert epoch(1) == epoch(1) != epoch(2)


def test_a_world_of_one_gets_the_loader_itself() -> None:
    loader = DataLoader(_numbers(8), batch_size=4)
    assert foreprop.shard(loader, world=worlds(1)[0]) is loader
    assert foreprop.shard(loader) is loader


def test_the_loaders_own_attributes_are_there() -> None:
    loader = _shards(24, 2)[0]
    assert loader.batch_size == 4
    assert len(loader.dataset) == 24
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing


class _Pairs(Sampler[list[int]]):
    """Batches of two neighbours, seven of them."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([2 * i, 2 * i + 1] for i in range(7))

    def __len__(self) -> int:
        return 7


def test_batches_of_ones_own_are_dealt_out_in_turn() -> None:
    loaders = [
        foreprop.shard(DataLoader(_numbers(14), batch_sampler=_Pairs()), world=world)
        for world in worlds(2)
    ]
    assert [_epoch(loader) for loader in loaders] == [
        [[0, 1], [4, 5], [8, 9], [12, 13]],
        [[2, 3], [6, 7], [10, 11], [0, 1]],
    ]
    assert [len(loader) for loader in loaders] == [4, 4]


def test_a_plain_batch_sampler_is_like_batch_size() -> None:
    sampler = BatchSampler(SequentialSampler(range(16)), 4, drop_last=False)
    shares = [
        _flat(_epoch(foreprop.shard(DataLoader(_numbers(16), batch_sampler=sampler), world=world)))
        for world in worlds(2)
    ]
    assert sorted(shares[0] + shares[1]) == list(range(16))


def test_a_loader_is_sharded_once() -> None:
    loader = _shards(24, 2)[0]
    assert foreprop.shard(loader, world=worlds(2)[0]) is loader


def test_a_new_attribute_is_the_loaders() -> None:
    inner = DataLoader(_numbers(8), batch_size=4)
    loader: Any = foreprop.shard(inner, world=worlds(2)[0])
    loader.collate_fn = len
    assert list(loader) == [4]
    assert loader.collate_fn is len
    loader.epoch = 3
    assert loader.sampler.epoch == 3


@pytest.mark.parametrize("wrong", [_numbers(8), 3, None])
def test_what_is_no_loader_is_refused_with_advice_that_works(wrong: Any) -> None:
    (world, _) = worlds(2)
    with pytest.raises(ConfigError, match=r"DataLoader\(dataset, batch_size"):
        foreprop.shard(wrong, world=world)


@pytest.mark.parametrize("persistent", [False, *long_cases(True)])
def test_forked_workers_beside_an_open_session(persistent: bool) -> None:
    """They end, keep nothing open, and disturb no training."""
    before = len(os.listdir("/proc/self/fd"))
    model, optimizer = build_seeded(with_sgd())
    loader = foreprop.shard(
        DataLoader(
            _numbers(24),
            batch_size=4,
            shuffle=True,
            num_workers=2,
            multiprocessing_context="fork",
            persistent_workers=persistent,
        ),
        world=worlds(2)[1],
    )
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        for _ in range(3):
            train_classifier(model, optimizer, make_batches(1))
            assert len(_flat(_epoch(loader))) == 12
            train_classifier(model, optimizer, make_batches(1))
    del loader
    assert len(os.listdir("/proc/self/fd")) <= before + 8  # the fixture looks closer, and later
