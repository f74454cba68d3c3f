"""The demo's network: it really trains, and takes the time that an emulated accelerator would.

What two cores compute for four nodes takes half as long again from one step to the next. So each
layer occupies its device's clock (`lab.accelerator.DeviceClock`) while its numbers are computed: a
step takes the time that the clock says, and the time in which it waits for parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from foreprop.plan.profile import Layer
from foreprop_lab.lab.accelerator import DeviceClock

FORWARD_SHARE = 1 / 3
SHARES = {"conv1": 0.40, "conv2": 0.50, "fc1": 0.08, "fc2": 0.02}
"""Shares of a step's compute. As in VGG-19, almost all computing is in the convolutions, and almost
all parameters are in the first fully connected layer."""


class TimedLayer(nn.Module):
    """A layer that applies the weight and bias of ``made``, and occupies the device's clock."""

    def __init__(
        self, made: nn.Conv2d | nn.Linear, apply: Callable[..., torch.Tensor], clock: DeviceClock
    ) -> None:
        super().__init__()
        self.weight = made.weight
        self.bias = nn.Parameter(torch.zeros(len(made.weight)) if made.bias is None else made.bias)
        self._apply_to, self._clock = apply, clock
        self.forward_s = self.backward_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        started_at = time.monotonic()
        # This waits for a parameter that is missing. The weight's gradient is the first to arrive:
        # autograd goes through the views in the opposite order.
        bias, weight = self.bias.view_as(self.bias), self.weight.view_as(self.weight)
        self._clock.waited(started_at)
        if weight.requires_grad:
            weight.register_hook(self._computed)  # type: ignore[no-untyped-call]
        result = self._apply_to(x, weight, bias)
        self._clock.occupy(self.forward_s)
        return result

    def _computed(self, gradient: torch.Tensor) -> None:
        """Keep the gradient back until the emulated device would have computed it."""
        self._clock.occupy(self.backward_s)
        self._clock.backward_ended_at = time.monotonic()


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.max_pool2d(torch.relu(functional.conv2d(x, weight, bias, padding=1)), 2)


class SmallVgg(nn.Module):
    """A small VGG for 1x28x28 images; 1.6 of its 1.65 million parameters are in ``fc1``.

    ``compute_s`` is a step's time on the emulated device; with 0 it runs as fast as it can.
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
        """Wait as the device does; call it after the backward pass, where DDP waits at its end."""
        self.clock.waited(self.clock.backward_ended_at)


def layers_of(compute_s: float) -> list[Layer]:
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
