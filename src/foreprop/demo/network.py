"""The demo's network: it really trains, and takes the time that an emulated accelerator would.

What two cores compute for four nodes takes half as long again from one step to the next. So each
layer occupies its device's clock (`foreprop.lab.accelerator.DeviceClock`), and the real computing
is done meanwhile: a step takes what the clock says, and what is waited for parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from foreprop.lab.accelerator import DeviceClock
from foreprop.workload.profile import Layer

FORWARD_SHARE = 1 / 3
SHARES = {"conv1": 0.40, "conv2": 0.50, "fc1": 0.08, "fc2": 0.02}
"""Of a step's compute. As in VGG-19, almost all computing is in the convolutions, and almost all
parameters are in the first fully connected layer."""


class TimedLayer(nn.Module):
    """Weight and bias of ``made``, and how they are applied; occupies the device's clock."""

    def __init__(
        self, made: nn.Conv2d | nn.Linear, apply: Callable[..., torch.Tensor], clock: DeviceClock
    ) -> None:
        super().__init__()
        self.weight = made.weight
        self.bias = nn.Parameter(torch.zeros(len(made.weight)) if made.bias is None else made.bias)
        self._apply_to, self._clock = apply, clock
        self.forward_s = self.backward_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked_at = time.monotonic()
        # Here a missing one is waited for. The weight's is the first gradient to arrive: autograd
        # goes through what was made last first.
        bias, weight = self.bias.view_as(self.bias), self.weight.view_as(self.weight)
        self._clock.waited(asked_at)
        if weight.requires_grad:
            weight.register_hook(self._computed)  # type: ignore[no-untyped-call]
        result = self._apply_to(x, weight, bias)
        self._clock.occupy(self.forward_s)
        return result

    def _computed(self, gradient: torch.Tensor) -> None:
        """The gradient is there, but not before the device would have it."""
        self._clock.occupy(self.backward_s)
        self._clock.backward_ended_at = time.monotonic()


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.max_pool2d(torch.relu(functional.conv2d(x, weight, bias, padding=1)), 2)


class SmallVgg(nn.Module):
    """VGG in small, for 1x28x28 images; 1.6 of its 1.65 million parameters are in ``fc1``.

    ``compute_s``: of a step on the emulated device; 0: as fast as it goes.
    """

    def __init__(self, compute_s: float = 0.0) -> None:
        super().__init__()
        self.clock = DeviceClock()
        self.conv1 = TimedLayer(nn.Conv2d(1, 16, 3), _convolve, self.clock)
        self.conv2 = TimedLayer(nn.Conv2d(16, 32, 3), _convolve, self.clock)
        self.fc1 = TimedLayer(nn.Linear(32 * 7 * 7, 1024), functional.linear, self.clock)
        self.fc2 = TimedLayer(nn.Linear(1024, 10), functional.linear, self.clock)
        self._occupy_for(compute_s)

    def take_no_time(self) -> None:
        """From now on, as after the training."""
        self._occupy_for(0.0)

    def _occupy_for(self, compute_s: float) -> None:
        for layer in layers_of(compute_s):
            timed: Any = getattr(self, layer.name)
            timed.forward_s, timed.backward_s = layer.forward_s, layer.backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc1(self.conv2(self.conv1(x)).flatten(1)))
        out: torch.Tensor = self.fc2(x)
        return out

    def end_backward(self) -> None:
        """To be called after the backward pass, which with DDP ends with a wait for gradients."""
        self.clock.waited(self.clock.backward_ended_at)


def layers_of(compute_s: float) -> list[Layer]:
    """In the order of the forward pass."""
    sizes = {
        "conv1": (16 * 9, 16),
        "conv2": (32 * 16 * 9, 32),
        "fc1": (1024 * 32 * 7 * 7, 1024),
        "fc2": (10 * 1024, 10),
    }
    return [
        Layer(
            name=name,
            sizes_elems=sizes[name],
            forward_s=share * compute_s * FORWARD_SHARE,
            backward_s=share * compute_s * (1 - FORWARD_SHARE),
        )
        for name, share in SHARES.items()
    ]
