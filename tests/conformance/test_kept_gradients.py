"""Averages that stay in ``p.grad`` from one step to another, where no pass adds to them.

A layer is frozen, or left out of a pass, and its gradient is not zeroed: it is what DDP would have,
and takes part in norms, in scaling and in the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from foreprop.core.frames import PACE_STEPS
from tests.conformance.averaging_by_hand import Average, backward, check_contract
from tests.conformance.parity import Batch, Build, once, small_model

pytestmark = once
ARCHITECTURES = ["p2p", "ring"]
KEEPS, FROZEN_LATER = 2 * PACE_STEPS + 2, 2
"""The step whose gradients are kept: servers tell norms by then. And the layer frozen after it."""
AFTER = 4
CLOSE = 1e-5
"""Norms are added up otherwise than torch does."""


def _grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _read(model: nn.Module) -> list[float]:
    return [float(gradient.abs().max()) for gradient in _grads(model)]


def _clip_by_own_norm(model: nn.Module) -> float:
    norm = sum(float(g.double().square().sum()) for g in _grads(model)) ** 0.5
    for gradient in _grads(model):
        gradient.mul_(0.1 / norm)
    return norm


def _scale_in_place(model: nn.Module) -> list[float]:
    """As lists are, or one by one: each time the first one may be the one that is kept."""
    torch._foreach_mul_(_grads(model), 0.5)
    for gradient in reversed(_grads(model)):
        gradient.mul_(0.5)
    return _read(model)


USES: dict[str, Callable[[nn.Module], Any]] = {
    "clip": lambda m: [clip_grad_norm_(m.parameters(), 0.1), _read(m)],
    "clip as a list": lambda m: [clip_grad_norm_(m.parameters(), 0.1, foreach=True), _read(m)],
    "clip by own norm": _clip_by_own_norm,
    "scale": _scale_in_place,
}


def _building(*, first: str) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        model[0].requires_grad_(first == "trained")
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    return build


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("first", ["trained", "kept"])
@pytest.mark.parametrize("use", USES)
def test_a_kept_gradient_counts_in_norms_and_is_scaled(
    use: str, first: str, architecture: str
) -> None:
    """``first``: which gradient the loop comes to first, one of this step's or the kept one."""

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        results = []
        for number, batch in enumerate(batches):
            if number == KEEPS + 1:
                model[FROZEN_LATER].requires_grad_(False)
            for _ in range(2 if number == KEEPS + 1 else 1):  # one more than is expected
                backward(model, batch)
            average(model)
            results.append(USES[use](model))
            optimizer.step()
            for parameter in model.parameters():
                if number < KEEPS or (number > KEEPS and parameter.requires_grad):
                    parameter.grad = None
        return results

    check_contract(
        _building(first=first),
        loop,
        steps=KEEPS + 1 + AFTER,
        rtol=CLOSE,
        architecture=architecture,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_decay_after_the_step(architecture: str) -> None:
    """What comes after `step()` does not change its updates, which are still to be made.

    The first gradient of the list belongs to no update.
    """

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        for number, batch in enumerate(batches):
            model[0].requires_grad_(number == 0)
            backward(model, batch)
            average(model)
            if not number:
                _read(model)
            optimizer.step()
            torch._foreach_mul_(_grads(model), 0.5)
        return [gradient.clone() for gradient in _grads(model)]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9)

    check_contract(build, loop, architecture=architecture, rtol=CLOSE)
