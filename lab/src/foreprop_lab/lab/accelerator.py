"""An emulated accelerator: layers that occupy a device's clock instead of computing.

Everything else is the real thing: autograd, gradients of the real shapes, waiting parameters,
hooks, optimizer. Host delays do not stretch the compute; only missing parameters make it idle.
Where the host launches kernels (`Launches`) what holds the interpreter then stretches it, too.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from foreprop.plan.profile import Layer, ProfiledArray
from foreprop_lab.setting.labsetting import launches_in
from foreprop_lab.setting.unevenness import Draw

_SAMPLES = 8
_ROW_SPREAD = 1.0
"""The standard deviation of the logarithm of rows' scales."""
_RELATIVE = 4e-3
"""Gradients over values. With SGD of 0.1 and momentum 0.9 values change by about 1e-3 of them."""


def shape_like(elems: int, shape: Sequence[int]) -> tuple[int, ...]:
    """A scaled array's shape: the proportions and dimensions of `shape`, but at most 2.

    A matrix has as many rows as the divisor of ``elems`` that is nearest to those proportions.
    """
    if len(shape) < 2:
        return (elems,)
    wanted = shape[0] * math.sqrt(elems / math.prod(shape))
    small = [number for number in range(1, math.isqrt(elems) + 1) if elems % number == 0]
    divisors = [*small, *(elems // number for number in small)]
    rows = min(divisors, key=lambda number: abs(math.log(number / wanted)))
    return rows, elems // rows


class DrawnArray:
    """One array's first values, and its gradients: float32 of ``shape``, a vector or a matrix.

    No device computes them, but codecs see real ones. A linear layer's gradient is a sum over
    samples of outer products, of its outputs' gradients and its inputs (Rumelhart et al. 1986). So
    these are drawn, for a few samples: inputs behind a ReLU, half of them zeros; outputs' gradients
    normal, with a scale of its own for each row. Their products have the spread exponents and the
    low rank that lossless codecs, top-k and PowerSGD live by. Each step and each rank has draws of
    its own.

    Ranks draw the same values and other gradients; each array has a ``seed``. In each step only a
    share ``touched`` of the rows is not zero, as of an embedding.
    """

    def __init__(
        self, shape: Sequence[int], *, seed: int, rank: int = 0, touched: float | None = None
    ) -> None:
        self._shape = tuple(shape)
        common = torch.Generator().manual_seed(seed)
        self._scale = math.sqrt(2 / shape[-1]) if len(shape) > 1 else 1.0  # He et al. 2015
        self.values = torch.randn(self._shape, generator=common).mul_(self._scale)
        rows = torch.randn(self._shape[0], generator=common).mul_(_ROW_SPREAD).exp_()
        self._row_scales = rows.mul_(_RELATIVE * self._scale / math.exp(_ROW_SPREAD**2))
        self._touched = touched
        self._own = torch.Generator().manual_seed(seed * 65_537 + rank)

    def gradient(self) -> torch.Tensor:
        """The next gradient; its root mean square is about 0.004 of the values'."""
        own, rows = self._own, self._row_scales
        if self._touched is not None:
            rows = rows * (torch.rand(rows.shape, generator=own) < self._touched)
        if len(self._shape) == 1:
            return torch.randn(self._shape, generator=own).mul_(rows)
        outputs = torch.randn((_SAMPLES, self._shape[0]), generator=own).mul_(rows)
        inputs = torch.randn((_SAMPLES, self._shape[1]), generator=own).relu_()
        # the mean square of a ReLU's output is a half
        return torch.mm(outputs.mul_(math.sqrt(2 / _SAMPLES)).t(), inputs)


_LATE_S = 0.5e-3
"""A host that is held up for less than this has not waited for parameters."""
_HELD_S = 5e-6
"""An operation that takes longer by less than this has not waited for the interpreter."""


class Launches:
    """Operations that hold the interpreter as launching kernels does, of ``cost_s`` each.

    One is a call of torch, which gives the interpreter's lock away for a moment and takes it back,
    and Python for the rest of the time. If another thread has taken the lock, the call waits.
    """

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s
        self._operand = torch.zeros(16)
        least_s = math.inf
        for _ in range(50):
            started = time.monotonic()
            for _ in range(20):
                self._operand.add_(1.0)
            least_s = min(least_s, (time.monotonic() - started) / 20)
        self._call_s = least_s
        """What the call takes if nothing is in its way: the least of many means."""

    def make(self, seconds: float) -> float:
        """Launch a pass of so many seconds; returns how long that waited for the interpreter.

        An operation during which this thread has slept found the lock taken. One that is only late
        waited for a processor, of which the nodes of a real cluster have their own.
        """
        held_s, sleeps, now = 0.0, _sleeps(), time.monotonic()
        for _ in range(launches_in(seconds, self._cost_s)):
            started = now
            self._operand.add_(1.0)
            now = time.monotonic()
            # a call that was held up leaves Python as much to do as any other
            late_s = now - started - self._call_s
            ends_at = started + self._cost_s + (late_s if late_s > _HELD_S else 0.0)
            while now < ends_at:
                now = time.monotonic()
            if now - started - self._cost_s > _HELD_S:
                before, sleeps = sleeps, _sleeps()
                if sleeps > before:
                    held_s += now - started - self._cost_s
        return held_s


def _sleeps() -> int:
    """How often this thread has given its processor away by itself, to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class DeviceClock:
    """The clock of the emulated device: when it will be free."""

    def __init__(self, launches: Launches | None = None) -> None:
        self._launches = launches
        self.free_at = time.monotonic()
        self.idle_s = 0.0
        self.held_s = 0.0
        """How long launching has waited for the interpreter, and so the device."""
        self.backward_ended_at = self.free_at
        """When the host was done with the latest layer of a backward pass."""
        self.waits_for_host = False
        """Whether the device has no work ahead, so that what delays the host delays it, too."""

    def occupy(self, seconds: float) -> None:
        """Give the device work, and return when it is done."""
        if self.waits_for_host:
            self.restart()
        if self._launches is not None:
            held_s = self._launches.make(seconds)
            self.held_s += held_s
            self.free_at += held_s
        self.free_at += seconds
        remaining = self.free_at - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)

    def waited(self, since: float) -> None:
        """Note that the host, and so the device, has waited for parameters since then."""
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
    """A layer that occupies the clock, touches its parameters as a real one, and makes gradients.

    Without ``drawn`` arrays it has vectors of its sizes.
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
        # the first use of a parameter that is missing waits for it
        arrays = [array.view_as(array) for array in self.parameters()]
        self.clock.waited(asked_at)
        result: torch.Tensor = _Occupy.apply(x, self, *arrays)  # type: ignore[no-untyped-call]
        return result


class OnDevice(torch.nn.Module):
    """A model whose layers occupy the device, in every step alike."""

    clock: DeviceClock

    def begin_step(self, number: int) -> None:
        """Begin the step of this number: a backward pass, and the forward pass after it."""

    def end_backward(self) -> None:
        """Wait as the device does; call it after ``loss.backward()``, whose end DDP waits for."""


class EmulatedModel(OnDevice, torch.nn.Sequential):
    """A model of emulated layers, which takes and returns a tensor of one element.

    ``draw`` gives one rank's times of each step; without it ``layers`` say how long they take. The
    profile's ``arrays``, by layer, have the shapes; without them all are vectors. ``launches`` are
    made by the host for each pass of a layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        draw: Draw | None = None,
        *,
        arrays: Sequence[Sequence[ProfiledArray]] | None = None,
        rank: int = 0,
        launches: Launches | None = None,
    ) -> None:
        clock = DeviceClock(launches)
        drawn = _drawn(layers, arrays, rank)
        emulated = [
            EmulatedLayer(layer, clock, own) for layer, own in zip(layers, drawn, strict=True)
        ]
        super().__init__(*emulated)
        self.clock = clock
        self._emulated = emulated
        self._draw = draw

    def begin_step(self, number: int) -> None:
        if self._draw is None:
            return
        for layer, (forward_s, backward_s) in zip(
            self._emulated, self._draw(number)[0], strict=True
        ):
            layer.forward_s, layer.backward_s = float(forward_s), float(backward_s)

    def end_backward(self) -> None:
        self.clock.waited(self.clock.backward_ended_at)


def _drawn(
    layers: Sequence[Layer], arrays: Sequence[Sequence[ProfiledArray]] | None, rank: int
) -> list[list[DrawnArray]]:
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
