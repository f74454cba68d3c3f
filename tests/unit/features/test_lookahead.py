"""Batches read one ahead: the same ones, each once its successor is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import foreprop
from foreprop.features.tables.lookahead import Lookahead, lookahead
from tests.cluster import worlds


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(20)


def _data() -> TensorDataset:
    return TensorDataset(torch.arange(20))


KINDS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(_data(), batch_size=3, shuffle=True),
    "weighted": lambda: DataLoader(_data(), sampler=WeightedRandomSampler([1.0] * 20, 20)),
    "workers": lambda: DataLoader(_data(), batch_size=3, num_workers=2),
    "stream": lambda: DataLoader(_Stream(), batch_size=3),
    "ready": lambda: DataLoader(_Stream(), batch_size=None),
    "list": lambda: [[number] for number in range(20)],
    "generator": lambda: ([number] for number in range(20)),
}


CASES = [(kind, divided) for divided in (False, True) for kind in KINDS]


@pytest.mark.parametrize(
    ("kind", "divided"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case == ("workers", True))) for case in CASES],
)
def test_every_kind_of_sharded_loader_is_read_one_ahead(kind: str, divided: bool) -> None:
    (world, _) = worlds(2)
    torch.manual_seed(0)
    plain = [str(batch) for batch in foreprop.shard(KINDS[kind](), world=world, divided=divided)]
    leave = lookahead.join()
    try:
        torch.manual_seed(0)
        seen, announced = [], []
        for batch in foreprop.shard(KINDS[kind](), world=world, divided=divided):
            assert lookahead.current is batch
            seen.append(str(batch))
            announced.append(str(lookahead.upcoming))
    finally:
        leave()
    assert seen == plain
    assert announced == [*plain[1:], "None"]
    assert lookahead.current is lookahead.upcoming is None


@pytest.mark.parametrize("users", [0, 1])
def test_a_batch_may_be_none(users: int) -> None:
    ahead = Lookahead()
    ahead.users = users
    batches = [1, None, None, 2, None]
    assert list(ahead.follow(iter(batches))) == batches
    if users:
        seen = [(ahead.current, ahead.upcoming) for _ in ahead.follow(iter(batches))]
        assert seen == list(zip(batches, [*batches[1:], None], strict=True))
