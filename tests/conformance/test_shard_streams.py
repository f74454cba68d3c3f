"""`foreprop.shard` of what can only be read in order: iterable data sets and plain iterables."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import foreprop
from foreprop.session.shares import SharedStream
from tests.cluster import worlds
from tests.conformance.matrices import few
from tests.conformance.shares import epoch_of, flat, in_batches, sharded, torchs_share
from tests.tiers import long_cases

RANKS = pytest.mark.parametrize("ranks", [3, *long_cases(2, 4)])
WORKERS = pytest.mark.parametrize("workers", [0, 2])
SIZE = 23


class Stream(IterableDataset[int]):
    """Knows nothing of workers; its order is drawn from the global generators if ``shuffle``."""

    def __init__(self, *, shuffle: bool = False) -> None:
        self.shuffle = shuffle
        self.start, self.step = 0, 1

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.start, SIZE, self.step))
        if self.shuffle:
            random.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return SIZE


class DividedByWorker(Stream):
    """As torch's documentation has it, first way."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        order = list(super().__iter__())
        yield from order if info is None else order[info.id :: info.num_workers]


def divide_by_worker(worker: int) -> None:
    """As torch's documentation has it, second way."""
    info: Any = get_worker_info()
    info.dataset.start, info.dataset.step = worker, info.num_workers


def name_worker(worker: int) -> None:
    """Divides nothing."""
    threading.current_thread().name = f"worker-{worker}"


def expected_batches(order: list[int], rank: int, ranks: int, workers: int) -> list[list[int]]:
    """A worker's batches are of every ``workers``-th sample of the rank's share; they alternate."""
    share = torchs_share(order, rank, ranks)
    by_worker = [in_batches(share[number :: max(workers, 1)], 3) for number in range(workers or 1)]
    return _alternating(by_worker)


def expected_of_divided(order: list[int], rank: int, ranks: int) -> list[list[int]]:
    """Each worker's own samples are divided among the ranks."""
    return _alternating(
        [in_batches(torchs_share(order[number::2], rank, ranks), 3) for number in range(2)]
    )


def _alternating(by_worker: list[list[list[int]]]) -> list[list[int]]:
    longest = max(len(batches) for batches in by_worker)
    return [
        batches[number]
        for number in range(longest)
        for batches in by_worker
        if number < len(batches)
    ]


@RANKS
@WORKERS
def test_an_iterable_data_set(ranks: int, workers: int) -> None:
    loaders = sharded(lambda: DataLoader(Stream(), batch_size=3, num_workers=workers), ranks)
    for rank, loader in enumerate(loaders):
        expected = expected_batches(list(range(SIZE)), rank, ranks, workers)
        assert epoch_of(loader) == epoch_of(loader) == expected
        assert len(loader) == math.ceil(math.ceil(SIZE / ranks) / 3)
        assert isinstance(loader.dataset, Stream)
        assert len(loader.dataset) == SIZE


@given(
    size=st.integers(0, 40),
    ranks=st.integers(2, 5),
    batch=st.integers(1, 6),
    drop_last=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_for_every_size(size: int, ranks: int, batch: int, drop_last: bool) -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(size)

    options: dict[str, Any] = {"batch_size": batch, "drop_last": drop_last}
    for rank, loader in enumerate(sharded(lambda: DataLoader(Numbers(), **options), ranks)):
        share = torchs_share(range(size), rank, ranks) if size else []
        batches = in_batches(share, batch)
        assert epoch_of(loader) == [b for b in batches if len(b) == batch or not drop_last]


@RANKS
@pytest.mark.parametrize(("persistent", "way"), few([False, True], ["iter", "init"]))
def test_one_that_divides_itself_among_workers(ranks: int, persistent: bool, way: str) -> None:
    def loader() -> DataLoader[int]:
        data = DividedByWorker() if way == "iter" else Stream()
        init = None if way == "iter" else divide_by_worker
        return DataLoader(
            data,
            batch_size=3,
            num_workers=2,
            worker_init_fn=init,
            persistent_workers=persistent,
        )

    for rank, share in enumerate(sharded(loader, ranks)):
        expected = expected_of_divided(list(range(SIZE)), rank, ranks)
        assert epoch_of(share) == epoch_of(share) == expected
        assert share.worker_init_fn in (None, divide_by_worker)
        del share


@pytest.mark.parametrize(("kind", "workers"), few([Stream, DividedByWorker], [0, 2]))
def test_one_that_shuffles_does_so_alike_on_all_ranks(kind: Any, workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}

    def loader() -> DataLoader[int]:
        return DataLoader(kind(shuffle=True), batch_size=3, **options)

    loaders, epochs = sharded(loader, 3, seed=5), []
    for _ in range(2):
        shares = []
        for rank, share in enumerate(loaders):
            random.seed(rank)
            torch.manual_seed(rank)
            shares.append(flat(epoch_of(share)))
        assert set(flat(shares)) == set(range(SIZE))
        assert len({len(share) for share in shares}) == 1
        assert len(flat(shares)) - SIZE < 3 * max(workers, 1)  # filled up
        epochs.append(shares)
    assert epochs[0] != epochs[1]
    (again, *_) = sharded(
        lambda: DataLoader(kind(shuffle=True), batch_size=3, **options), 3, seed=5
    )
    again.set_epoch(1)
    assert flat(epoch_of(again)) == epochs[1][0]


@pytest.mark.long
def test_spawned_workers() -> None:
    loader = DataLoader(
        DividedByWorker(),
        batch_size=3,
        num_workers=2,
        multiprocessing_context="spawn",
        worker_init_fn=name_worker,
    )
    share = foreprop.shard(loader, world=worlds(2)[1])
    assert epoch_of(share) == expected_of_divided(list(range(SIZE)), 1, 2)


class Ready(IterableDataset[list[int]]):
    """Batches that it makes itself."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from in_batches(range(SIZE), 3)


@RANKS
@WORKERS
def test_batches_that_the_data_set_makes(ranks: int, workers: int) -> None:
    """An incomplete last round is left out."""
    loaders = sharded(lambda: DataLoader(Ready(), batch_size=None, num_workers=workers), ranks)
    mine = in_batches(range(SIZE), 3)
    whole = len(mine) // ranks * ranks
    for rank, loader in enumerate(loaders):
        assert epoch_of(loader) == mine[rank:whole:ranks]
        with pytest.raises(TypeError):
            len(loader)


@RANKS
def test_a_list_of_batches(ranks: int) -> None:
    batches = [torch.tensor(batch) for batch in in_batches(range(SIZE), 3)]
    for rank, share in enumerate(sharded(lambda: batches, ranks)):
        order = torchs_share(range(8), rank, ranks)
        assert epoch_of(share) == epoch_of(share) == [batches[n].tolist() for n in order]
        assert len(share) == len(order)


@RANKS
def test_a_generators_result(ranks: int) -> None:
    def batches() -> Iterator[list[int]]:
        yield from in_batches(range(SIZE), 3)

    mine = list(batches())
    for rank, share in enumerate(sharded(batches, ranks)):
        expected = mine[rank : 8 // ranks * ranks : ranks]
        assert next(share) == expected[0]
        assert epoch_of(share) == expected[1:]  # goes on where it was left
        assert list(share) == []


class Loop:
    """An iterable of one's own that shuffles, with what scripts read from loaders."""

    batch_size = 3

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        yield from in_batches(order, 3)

    def __len__(self) -> int:
        return 8


@RANKS
def test_an_iterable_of_ones_own(ranks: int) -> None:
    epochs = []
    for _ in range(2):
        shares = []
        for rank, share in enumerate(sharded(Loop, ranks)):
            torch.manual_seed(rank)
            share.set_epoch(len(epochs))
            shares.append(epoch_of(share))
            assert len(share) == len(shares[-1]) == 8 // ranks
            assert share.batch_size == 3
        seen = flat(flat(shares))  # type: ignore[arg-type]
        assert len(seen) == len(set(seen))
        epochs.append(shares)
    assert epochs[0] != epochs[1]


def test_no_more_is_read_than_a_batch_needs() -> None:
    read: list[int] = []

    class Live(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            for number in range(1000):
                read.append(number)
                yield number

    for rank, loader in enumerate(sharded(lambda: DataLoader(Live(), batch_size=4), 2)):
        read.clear()
        assert next(iter(loader)).tolist() == [rank, rank + 2, rank + 4, rank + 6]
        assert len(read) == 8


def test_the_source_is_told_the_epoch_and_its_attributes_are_there() -> None:
    class Told(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = Told()
    loader: Any = foreprop.shard(DataLoader(data), world=worlds(2)[0])
    loader.set_epoch(7)
    assert data.epoch == loader.epoch == 7
    stream = loader._loader.dataset
    assert isinstance(stream, SharedStream)
    assert stream.step == 1
    with pytest.raises(AttributeError):
        _ = stream.no_such_thing
