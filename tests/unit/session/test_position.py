"""A loader that goes on where it was gives what it would have given."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import foreprop
from foreprop.errors import ConfigError
from foreprop.session.position import LoaderPosition
from tests.cluster import worlds
from tests.tiers import long_cases

SAMPLES, EPOCHS = 22, 3


class Noisy(Dataset[Any]):
    """Each sample has numbers of all three global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Noisy()[random.randrange(SAMPLES)] for _ in range(SAMPLES))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, **options)


def with_generator() -> DataLoader[Any]:
    return shuffled(generator=torch.Generator().manual_seed(5))


def with_sampler() -> DataLoader[Any]:
    sampler = RandomSampler(Noisy(), generator=torch.Generator().manual_seed(6))
    return DataLoader(Noisy(), batch_size=3, sampler=sampler)


def sharded(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: foreprop.shard(make(), world=worlds(2)[1])


def counting() -> Any:
    return range(7)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "with a generator": with_generator,
    "with a sampler": with_sampler,
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "sharded": sharded(shuffled),
    "sharded, with a generator": sharded(with_generator),
    "sharded stream": sharded(lambda: DataLoader(Stream(), batch_size=4)),
    "numbers": counting,
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """The state, written and read as in a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def run(position: LoaderPosition, saved: list[Any]) -> Iterator[Any]:
    """A loop over all epochs that draws numbers itself, and leaves its state at each border."""
    position.be_between()
    while position.epoch < EPOCHS:
        saved.append(position.state())
        for batch in position.begin():
            position.batches += 1
            yield position.epoch, plain(batch), float(torch.rand(())), random.random()
            saved.append(position.state())
        yield position.epoch, float(np.random.rand())
        position.end()


USUAL = ("with a sampler", "sharded, with a generator", "sharded stream", "numbers")
OTHERS = [name for name in LOADERS if name not in USUAL]


@pytest.mark.parametrize("name", [*USUAL, *long_cases(*OTHERS)])
def test_it_goes_on_from_every_batch_as_if_it_had_not_stopped(name: str) -> None:
    seed(1)
    states: list[Any] = []
    whole, counts = [], []
    for item in run(LoaderPosition(LOADERS[name]()), states):
        counts.append(len(states))
        whole.append(item)
    assert len(states) > 10
    for number, state in enumerate(states):
        seed(99)
        position = LoaderPosition(LOADERS[name]())
        notice = position.restore(through_a_file(state), saved_by=1, world_size=1)
        assert notice is None
        done = sum(count <= number for count in counts)
        assert list(run(position, [])) == whole[done:], number


def test_a_loader_that_is_shorter_now() -> None:
    seed(1)
    position = LoaderPosition(range(5))
    for _ in position.begin():
        position.batches += 1
    again = LoaderPosition(range(4))
    again.restore(through_a_file(position.state()), saved_by=1, world_size=1)
    with pytest.raises(ConfigError, match=r"after 5 batches of epoch 0, and .* only 4 now"):
        again.begin()


class OwnState:
    """A loader that saves its own position, as torchdata's does; it must not be read again."""

    def __init__(self) -> None:
        self.first = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        for number in range(first, 6):
            self.read.append(number)
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"first": self.read[-1] + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


def test_a_loader_with_a_state_of_its_own_is_asked_for_it() -> None:
    position = LoaderPosition(OwnState())
    for number in position.begin():
        position.batches += 1
        if number == 2:
            break
    state = through_a_file(position.state())
    loader = OwnState()
    again = LoaderPosition(loader)
    again.restore(state, saved_by=2, world_size=2)
    assert list(again.begin()) == [3, 4, 5]
    assert loader.read == [3, 4, 5]
    with pytest.raises(ConfigError, match=r"made by 2 ranks in the middle of an epoch"):
        LoaderPosition(OwnState()).restore(state, saved_by=2, world_size=3)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2), (4, 3), (2, 1), (1, 2)])
def test_with_other_ranks_no_sample_of_the_epoch_is_lost(before: int, after: int) -> None:
    """Each rank has 2 batches; less than a batch of each comes twice."""

    class Numbers(Dataset[Any]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> int:
            return index

    def loaders(size: int) -> list[Any]:
        own = [DataLoader(Numbers(), batch_size=5, shuffle=True) for _ in range(size)]
        if size == 1:
            return own
        return [foreprop.shard(one, world=w) for one, w in zip(own, worlds(size), strict=True)]

    seen, states = [], []
    for loader in loaders(before):
        position = LoaderPosition(loader)
        batches = position.begin()
        for _ in range(2):
            seen += next(batches).tolist()
            position.batches += 1
        states.append(through_a_file(position.state()))
    assert len(seen) == 2 * 5 * before
    rest = []
    for rank, loader in enumerate(loaders(after)):
        position = LoaderPosition(loader)
        notice = position.restore(
            states[rank if rank < before else 0], saved_by=before, world_size=after
        )
        assert notice is not None
        assert "samples are divided anew from" in notice
        for batch in position.begin():
            rest += batch.tolist()
    assert set(seen) | set(rest) == set(range(60))
    twice = len(set(seen) & set(rest))
    assert twice == len(seen) if 1 in (before, after) else twice < 5 * after
