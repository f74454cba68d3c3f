"""This rank's share of what a sampler draws: indices, or batches of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from foreprop.data.ordercheck import OrderCheck
from foreprop.data.randomness import CommonRandomness
from foreprop.data.turns import Turn

_SEEDABLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_OF_TORCH = (*_SEEDABLE, SequentialSampler)
"""They draw from no other generator than their own."""


class SharedOrder(Sampler[Any]):
    """Every rank draws the whole order, alike, and keeps its turns. Each pass is an epoch.

    Random numbers come from ``seed`` and the epoch, unless the sampler has a generator of its own.
    """

    def __init__(self, sampler: Any, turn: Turn, seed: int) -> None:
        self.sampler = sampler
        self.epoch = 0
        """Which the next pass is."""
        self.drawn = False
        """Whether anybody has asked for the order."""
        self._turn = turn
        self._seed = seed
        self.check: OrderCheck | None = None

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is; told to the sampler, too, if it wants to know."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        seed = self._seed + epoch
        self.drawn = True
        drawing: AbstractContextManager[object] = nullcontext()
        if type(self.sampler) not in _OF_TORCH:
            drawing = CommonRandomness(seed)
        with drawing:
            drawn = iter(_seeded(self.sampler, seed))
        if self.check is not None:
            drawn = self.check.watch(drawn, epoch)
        yield from self._turn.deal(drawn, drawing)

    def __len__(self) -> int:
        return self._turn.count(len(self.sampler))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "sampler" not in vars(self):
            raise AttributeError(name)
        return getattr(self.sampler, name)


def _seeded(sampler: Any, seed: int) -> Any:
    """With the generator that DistributedSampler would have in this epoch, if it has none."""
    if not isinstance(sampler, _SEEDABLE) or sampler.generator is not None:
        return sampler
    drawing = copy.copy(sampler)
    drawing.generator = torch.Generator().manual_seed(seed)
    return drawing
