"""An emulated accelerator: layers that occupy a device's clock instead of computing.

Everything else is the real thing: autograd, gradients of the real shapes, waiting parameters,
hooks, optimizer. Host delays do not stretch the compute; only missing parameters make it idle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from foreprop.lab.drawnarrays import DrawnArray, shape_like
from foreprop.workload.profile import Layer, ProfiledArray
from foreprop.workload.unevenness import Draw

_LATE_S = 0.5e-3
"""A host that is held up for less than this has not waited for parameters."""


class DeviceClock:
    """When the emulated device will be free."""

    def __init__(self) -> None:
        self.free_at = time.monotonic()
        self.idle_s = 0.0
        self.backward_ended_at = self.free_at
        """When the host was done with the latest layer of a backward pass."""
        self.waits_for_host = False
        """Whether what delays the host delays the device, too: it has no work ahead."""

    def occupy(self, seconds: float) -> None:
        """Give the device work, and return when that is done."""
        if self.waits_for_host:
            self.restart()
        self.free_at += seconds
        remaining = self.free_at - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)

    def waited(self, since: float) -> None:
        """The host has waited for parameters from ``since`` until now; so has the device."""
        now = time.monotonic()
        if now - since > _LATE_S and now > self.free_at:
            self.idle_s += now - self.free_at
            self.free_at = now

    def restart(self) -> None:
        self.free_at = max(self.free_at, time.monotonic())


class _Occupy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: EmulatedLayer, *_: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        layer.clock.occupy(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        layer: EmulatedLayer = ctx.layer
        # A device makes them within the time of its backward pass, not after it.
        gradients = [array.gradient() for array in layer.drawn]
        layer.clock.occupy(layer.backward_s)
        layer.clock.backward_ended_at = time.monotonic()
        return gradient, None, *gradients


class EmulatedLayer(torch.nn.Module):
    """Occupies the clock, touches its parameters when a real layer would, makes gradients.

    ``drawn``: its arrays; None: vectors of its sizes.
    """

    def __init__(
        self, layer: Layer, clock: DeviceClock, drawn: Sequence[DrawnArray] | None = None
    ) -> None:
        super().__init__()
        if drawn is None:
            drawn = [DrawnArray((size,), seed=i) for i, size in enumerate(layer.sizes_elems)]
        self.drawn = drawn
        for i, array in enumerate(drawn):
            self.register_parameter(f"array{i}", torch.nn.Parameter(array.values))
        self.clock = clock
        self.forward_s = layer.forward_s
        self.backward_s = layer.backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked_at = time.monotonic()
        # here a missing one is waited for
        arrays = [array.view_as(array) for array in self.parameters()]
        self.clock.waited(asked_at)
        result: torch.Tensor = _Occupy.apply(x, self, *arrays)  # type: ignore[no-untyped-call]
        return result


class EmulatedModel(torch.nn.Sequential):
    """Takes and returns a tensor of one element; its arrays are those of ``layers``.

    ``draw``: what these take in each step, of one rank; None: always what they say. ``arrays``: as
    the profile has them, by layer, for their shapes; None: all are vectors.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        draw: Draw | None = None,
        *,
        arrays: Sequence[Sequence[ProfiledArray]] | None = None,
        rank: int = 0,
    ) -> None:
        clock = DeviceClock()
        drawn = _drawn(layers, arrays, rank)
        emulated = [
            EmulatedLayer(layer, clock, own) for layer, own in zip(layers, drawn, strict=True)
        ]
        super().__init__(*emulated)
        self.clock = clock
        self._emulated = emulated
        self._draw = draw

    def begin_step(self, number: int) -> None:
        """The backward pass, and the forward pass after it, are those of this step."""
        if self._draw is None:
            return
        for layer, (forward_s, backward_s) in zip(
            self._emulated, self._draw(number)[0], strict=True
        ):
            layer.forward_s, layer.backward_s = float(forward_s), float(backward_s)

    def end_backward(self) -> None:
        """To be called after ``loss.backward()``, which with DDP ends with a wait for gradients."""
        self.clock.waited(self.clock.backward_ended_at)


def _drawn(
    layers: Sequence[Layer], arrays: Sequence[Sequence[ProfiledArray]] | None, rank: int
) -> list[list[DrawnArray]]:
    """Of each layer."""
    seeds = count()
    if arrays is None:
        shapes = [[(size,) for size in layer.sizes_elems] for layer in layers]
        return [[DrawnArray(s, seed=next(seeds), rank=rank) for s in own] for own in shapes]
    return [
        [
            DrawnArray(
                shape_like(size, array.shape), seed=next(seeds), rank=rank, touched=array.alpha
            )
            for size, array in zip(layer.sizes_elems, own, strict=True)
        ]
        for layer, own in zip(layers, arrays, strict=True)
    ]
