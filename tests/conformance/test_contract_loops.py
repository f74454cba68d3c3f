"""Loops whose passes, steps and discards vary: each step applies what plain PyTorch would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.conformance.averaging_by_hand import (
    Average,
    ReadingLoop,
    backward,
    check_contract,
    gradients,
)
from tests.conformance.matrices import few
from tests.conformance.parity import Batch, servers_only, small_model, with_sgd

SETTINGS: dict[str, dict[str, Any]] = {
    "workers": {"update": "workers"},
    "ring": {"update": "workers", "architecture": "ring"},
    "tensorflow": {"update": "workers", "preset": "tensorflow"},
}


def accumulating(passes: Sequence[int]) -> ReadingLoop:
    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        rest = list(batches)
        for count in passes:
            optimizer.zero_grad()
            for _ in range(count):
                backward(model, rest.pop(0), 1 / count)
            average(model)
            optimizer.step()

    return loop


@pytest.mark.parametrize(
    ("passes", "setting"), few([(2, 3, 1), (1, 2, 3, 4), (3, 3, 1, 1, 3)], SETTINGS), ids=str
)
def test_passes_vary(passes: tuple[int, ...], setting: str) -> None:
    check_contract(with_sgd(), accumulating(passes), steps=sum(passes), **SETTINGS[setting])


@pytest.mark.parametrize(("setting", "zeroed"), few(SETTINGS, [True, False]))
def test_skipped_steps(setting: str, zeroed: bool) -> None:
    """Without `zero_grad()` the next step is made with both batches."""

    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        for number, batch in enumerate(batches):
            backward(model, batch)
            if number == 2:
                if zeroed:
                    optimizer.zero_grad()
                continue
            average(model)
            optimizer.step()
            optimizer.zero_grad()

    check_contract(with_sgd(), loop, steps=5, **SETTINGS[setting])


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_that_are_read_and_added_to(setting: str) -> None:
    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        seen = []
        for number, batch in enumerate(batches):
            backward(model, batch)
            average(model)
            seen += gradients(model)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    check_contract(with_sgd(), loop, steps=6, **SETTINGS[setting])


@pytest.mark.parametrize(("setting", "set_to_none"), few(SETTINGS, [True, False]))
def test_the_model_zeroes_gradients(setting: str, set_to_none: bool) -> None:
    """After `step()`, whose updates are still pending; and between two passes."""

    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        for number, batch in enumerate(batches):
            if number == 2:
                backward(model, batches[0])
                model.zero_grad(set_to_none=set_to_none)
            backward(model, batch)
            average(model)
            optimizer.step()
            model.zero_grad(set_to_none=set_to_none)

    check_contract(with_sgd(), loop, steps=5, **SETTINGS[setting])


@pytest.mark.parametrize("settings", [{}, *SETTINGS.values()], ids=str)
def test_the_rate_changes_between_backward_and_step(settings: dict[str, Any]) -> None:
    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            backward(model, batch)
            average(model)
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 2)
            optimizer.step()

    check_contract(with_sgd(), loop, steps=4, **settings)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_loop_that_starts_anew_without_zeroing(setting: str) -> None:
    """What an epoch's last passes have left is part of the next one's first step."""

    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        for epoch in (batches[:3], batches[3:]):
            for number, batch in enumerate(epoch):
                backward(model, batch)
                if number % 2:
                    average(model)
                    optimizer.step()
                    optimizer.zero_grad()

    check_contract(with_sgd(), loop, steps=7, **SETTINGS[setting])


class _NowAndThen(nn.Module):
    """One parameter is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()
        self.penalty = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


@pytest.mark.parametrize(
    ("local", "preset"),
    few([1, pytest.param(2, marks=servers_only)], ["tensorflow", "kvstore", "p3"]),
)
def test_a_parameter_that_is_used_now_and_then(local: int, preset: str) -> None:
    """In the other steps there is no average, also for who asks a relay."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _NowAndThen()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        seen = []
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if step % 3 == 1:
                loss = loss + model.penalty.square().sum()
            loss.backward()
            average(model)
            seen.append(None if model.penalty.grad is None else model.penalty.grad.clone())
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            seen.append(model.penalty.detach().clone())
        return seen

    relays = {"local_size": 2, "local_aggregation": "on"} if local == 2 else {}
    about = {"preset": preset, "update": "workers"}
    check_contract(build, loop, steps=6, ranks=4, **about, **relays)


def holding(when: str, clear: Any) -> ReadingLoop:
    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        seen, held = [], None
        for batch in batches:
            backward(model, batch)
            average(model)
            if when == "next backward" and held is not None:
                seen.append([gradient.clone() for gradient in held])
            earlier, held = held, [parameter.grad for parameter in model.parameters()]
            optimizer.step()
            clear(model, optimizer)
            if when == "at once":
                seen.append([gradient.clone() for gradient in held])
            if when == "next step" and earlier is not None:
                seen.append([gradient.norm() + gradient[0].sum() for gradient in earlier])
        return seen

    return loop


CLEARS = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "model": lambda model, _: model.zero_grad(),
}


@pytest.mark.parametrize(
    ("clear", "when", "settings"),
    few(CLEARS, ["at once", "next backward", "next step"], [{}, *SETTINGS.values()]),
    ids=str,
)
def test_a_gradient_that_is_held_when_there_is_none_any_more(
    clear: str, when: str, settings: dict[str, Any]
) -> None:
    """It is the average, as with DDP, whenever it is looked at."""
    check_contract(with_sgd(), holding(when, CLEARS[clear]), steps=5, **settings)
