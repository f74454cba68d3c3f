"""update="workers": gradients that a step finds gone, used twice, or not made at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.conformance.averaging_by_hand import Average, check_contract
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    batches_of,
    check_world_of_one,
    check_world_of_two,
    make_batches,
    servers_only,
    small_model,
    with_sgd,
)

pytestmark = servers_only  # each test names the architecture that it needs

Between = Callable[[nn.Module, torch.optim.Optimizer], object]


def _discard_one(model: nn.Module, _: torch.optim.Optimizer) -> None:
    next(model.parameters()).grad = None


DISCARDS: dict[str, Between] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "model": lambda model, _: model.zero_grad(),
    "one": _discard_one,
    "zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "twice": lambda _, optimizer: optimizer.step(),
}
ARCHITECTURES = ["p2p", "ring"]


def _sometimes(between: Between) -> Callable[..., None]:
    """A loop that does something between `backward()` and `step()`, in every third step."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if number % 3 == 2:
                between(model, optimizer)
            optimizer.step()

    return loop


@pytest.mark.parametrize(("way", "architecture"), few(DISCARDS, ARCHITECTURES))
def test_gradients_that_are_discarded_before_the_step(way: str, architecture: str) -> None:
    loop = _sometimes(DISCARDS[way])
    settings = {"update": "workers", "architecture": architecture}
    check_world_of_one(with_sgd(), loop, make_batches(5), **settings)
    check_world_of_two(with_sgd(), loop, batches_of(2, count=5), **settings)


class _Skipping(nn.Module):
    """Leaves its second layer out in every other pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.passes += 1
        return self.last(self.second(hidden) if self.passes % 2 else hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layer_that_the_next_step_does_not_use(architecture: str) -> None:
    """Its update has not been waited for when the next step is made."""
    loop = _sometimes(lambda *_: None)
    settings = {"update": "workers", "architecture": architecture}
    check_world_of_one(with_sgd(_Skipping), loop, make_batches(5), **settings)
    check_world_of_two(with_sgd(_Skipping), loop, batches_of(2, count=5), **settings)


@pytest.mark.parametrize("about", [{}, {"slice_elems": 3}])
def test_a_discarded_gradient_stays_so_though_somebody_holds_it(about: dict[str, Any]) -> None:
    """On one rank only; then its parameter is frozen, and the step is made without it."""
    holders: list[Sequence[Batch]] = []

    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        holders.append(batches)
        holds = batches is holders[0]
        held = []
        for number, (x, y) in enumerate(batches):
            if number == len(batches) - 1:
                model[2].requires_grad_(False)
            F.cross_entropy(model(x), y).backward()
            average(model)
            if number == len(batches) - 2:
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)  # type: ignore[union-attr]  # waits for no average
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
            if holds:
                held += [p.grad for p in model.parameters()]
            optimizer.zero_grad()

    check_contract(with_sgd(small_model, momentum=0.9), loop, steps=4, **about)
