"""Training whose gradients are clipped or summed, with one process or many."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from foreprop import PRESETS
from tests.conformance.parity import (
    Batch,
    Build,
    batches_of,
    build_seeded,
    check_same_bits,
    merge,
    run_foreprop,
    small_model,
    with_sgd,
)

Edit = Callable[[nn.Module], object]
"""What one process does to its gradients between backward() and step()."""
LIMIT = 0.1
"""For the norm; below what the models here begin with."""
Values = list[dict[str, torch.Tensor]]
"""The parameters after each step."""


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.output = nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.embedding(tokens))[0]).flatten(0, 1)


class TiedAttention(nn.Module):
    """The same matrix embeds and predicts, so its gradient comes from two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.output(self.norm(x + attended)).flatten(0, 1)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def token_batches(seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (4, 2, 4, 6), generator=generator)
    return [(x, y.flatten()) for x, y in tokens]


def image_batches(seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(4, 6, 2, 7, 7, generator=generator)
    labels = torch.randint(3, (4, 6), generator=generator)
    return list(zip(images, labels, strict=True))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Batch]]]] = {
    "mlp": (small_model, lambda seed: batches_of(seed + 1)[seed]),
    "cnn": (convolutional, image_batches),
    "lstm": (LanguageModel, token_batches),
    "tied attention": (TiedAttention, token_batches),
}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    edit: Edit = lambda _: None,
    after_step: Callable[[], object] = lambda: None,
    reduction: str = "mean",
) -> Values:
    values = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        edit(model)
        optimizer.step()
        after_step()
        values.append(values_of(model))
    return values


def alone(build: Build, by_rank: Sequence[Sequence[Batch]], edit: Edit, **options: Any) -> Values:
    """One process, with the whole batch."""
    model, optimizer = build_seeded(build)
    return train(model, optimizer, merge(by_rank), edit=edit, **options)


def together(
    build: Build, by_rank: Sequence[Sequence[Batch]], *, loss: str = "mean", **settings: Any
) -> Values:
    """All ranks, which must agree on every bit after every step."""

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> Values:
        return train(model, optimizer, batches, reduction=loss)

    ones, *others = (t.result for t in run_foreprop(build, loop, by_rank, **settings))
    for other in others:
        for step, values in enumerate(ones):
            check_same_bits(other[step], values)
    return ones


def check_each_step(got: Values, wanted: Values) -> None:
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        for name, value in theirs.items():
            assert torch.allclose(ours[name], value, rtol=2e-4, atol=2e-5), (step, name)


def data_of(model: str, ranks: int) -> tuple[Build, list[list[Batch]]]:
    make, batches = MODELS[model]
    return with_sgd(make, lr=0.3), [batches(rank) for rank in range(ranks)]


def scaled_to(norm: float, norms: list[float] | None = None) -> Edit:
    def edit(model: nn.Module) -> None:
        total = nn.utils.clip_grad_norm_(model.parameters(), norm)
        if norms is not None:
            norms.append(float(total))

    return edit


PARTITIONS: list[dict[str, Any]] = [
    {"slice_elems": 1},
    {"slice_elems": 7, "servers_per_node": 3},
    *({"preset": preset} for preset in PRESETS),
    {"preset": "kvstore", "big_array_elems": 10},
]


def wait_for(told: list[str]) -> None:
    """Who waits for that ends much sooner, if it ends."""
    until_s = time.monotonic() + 60
    while not told and time.monotonic() < until_s:
        time.sleep(0.01)
