"""Models with embedding tables, and texts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.conformance.parity import Batch, Build

torch.sparse.check_sparse_tensor_invariants.disable()  # torch's Adagrad warns until one chooses

ROWS, CLASSES = 40, 3
SERVED = ("p2p", "hybrid")


class Words(nn.Module):
    """A classifier of short texts."""

    def __init__(self, *, sparse: bool = True, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 6, sparse=sparse, **options)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words).tanh().mean(1))


class ManyWords(nn.Module):
    """Whose rows are long enough for a code."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 64, sparse=True)
        self.out = nn.Linear(64, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words).tanh().mean(1))


class Bags(nn.Module):
    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, CLASSES, mode="sum", sparse=sparse)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words)


class Pairs(nn.Module):
    """Looks into the same table twice, at other rows."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, CLASSES, sparse=sparse)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        left, right = words[:, :2], words[:, 2:]
        return (self.table(left) * self.table(right).sigmoid()).sum(1)


def with_optimizer(
    make: Callable[[], nn.Module],
    cls: type[torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, cls(model.parameters(), **{"lr": 0.3, **options})  # type: ignore[call-arg]

    return build


def words_of(seed: int, count: int = 4, *, once: bool = False, length: int = 4) -> list[Batch]:
    """Batches of 5 texts; ``once``: no word twice in a batch."""
    generator = torch.Generator().manual_seed(seed)

    def words() -> torch.Tensor:
        if once:
            return torch.randperm(ROWS, generator=generator)[: 5 * length].view(5, length)
        return torch.randint(ROWS, (5, length), generator=generator)

    return [(words(), torch.randint(CLASSES, (5,), generator=generator)) for _ in range(count)]


def ranks(count: int, **options: Any) -> list[list[Batch]]:
    return [words_of(seed, **options) for seed in range(count)]


class Two(nn.Module):
    """A large table of which little is used, and a small one that is used all over."""

    def __init__(self, *, sparse: tuple[bool, bool]) -> None:
        super().__init__()
        self.large = nn.Embedding(400, 6, sparse=sparse[0])
        self.small = nn.Embedding(4, 6, sparse=sparse[1])
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm((self.large(words * 9) + self.small(words % 4)).mean(1)))
