"""What loaders give each rank, and what torch's DistributedSampler would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DistributedSampler, TensorDataset

import foreprop
from tests.cluster import worlds


def numbers(size: int) -> TensorDataset:
    """Samples that say which they are."""
    return TensorDataset(torch.arange(size))


def sharded(make_loader: Any, ranks: int, **options: Any) -> list[Any]:
    """By rank, each from a loader of its own, as in processes of their own."""
    return [foreprop.shard(make_loader(), world=world, **options) for world in worlds(ranks)]


def epoch_of(loader: Any) -> list[list[int]]:
    """The batches of one pass, as lists of numbers."""
    return [_listed(batch) for batch in loader]


def _listed(batch: Any) -> list[int]:
    if isinstance(batch, torch.Tensor):
        return [int(number) for number in batch.reshape(-1)]
    if isinstance(batch, int):
        return [batch]
    return [number for part in batch for number in _listed(part)]


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [item for batch in batches for item in batch]


def torchs_share(order: Sequence[int], rank: int, ranks: int) -> list[int]:
    """DistributedSampler's, of samples in this order."""
    sampler = DistributedSampler(order, ranks, rank, shuffle=False)  # type: ignore[arg-type]
    return [order[index] for index in sampler]


def in_batches(items: Sequence[int], size: int) -> list[list[int]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def interleaved(shares: Sequence[Sequence[int]]) -> list[int]:
    """What was dealt out, in its order, with what it was filled up with."""
    return [item for round_ in zip(*shares, strict=True) for item in round_]
