"""update="workers": gradients that a step finds gone, used twice, or not made at all."""

from __future__ import annotations

import threading
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


class _LeavingOut(_Skipping):
    """Does not use its second layer in the pass ``without``, counted from 0."""

    without = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number, self.passes = self.passes, self.passes + 1
        hidden = self.first(x)
        return self.last(hidden if number == self.without else self.second(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(("way", "at"), [("optimizer", 2), ("by hand", 2), ("by hand", 0)])
def test_a_discarded_gradient_that_one_rank_still_holds(
    way: str, at: int, skips: bool, architecture: str
) -> None:
    """As the thread does that sends it: whether it is still there decides nothing."""
    held: list[torch.Tensor | None] = []

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        model.without = at + 1
        for number, (x, y) in enumerate(batches):
            F.cross_entropy(model(x), y).backward()
            if number == at:
                if threading.current_thread().name == "rank-0":
                    held.extend(p.grad for p in model.second.parameters())
                if way == "by hand":
                    for parameter in model.second.parameters():
                        parameter.grad = None
            average(model)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            if not (skips and number == at):
                optimizer.step()
            optimizer.zero_grad()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _LeavingOut()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    check_contract(build, loop, steps=5, architecture=architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("way", ["optimizer", "by hand"])
def test_a_gradient_that_is_read_after_it_was_dropped(way: str, architecture: str) -> None:
    """It had not left yet, for the step before had more passes: every rank reads an average."""
    passes = (2, 2, 2, 1, 2)

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        left, read = iter(batches), []
        for several in passes:
            for _ in range(several):
                x, y = next(left)
                F.cross_entropy(model(x), y).backward()
            average(model)
            held = [parameter.grad for parameter in model.parameters()]
            if several == 1 and way == "optimizer":
                optimizer.zero_grad()
            elif several == 1:
                for parameter in model.parameters():
                    parameter.grad = None
            read.append([gradient.clone() for gradient in held])
            optimizer.step()
            optimizer.zero_grad()
        return read

    check_contract(with_sgd(), loop, steps=sum(passes), architecture=architecture)
