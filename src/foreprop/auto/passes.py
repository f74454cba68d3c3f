"""Forward and backward passes of a user's model, timed plainly or watched array by array.

What a pass may change is put back afterwards (`Untouched`).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from foreprop.auto.attribution import PassRecord
from foreprop.hooks.interception import watch_entries
from foreprop.hooks.modelhooks import FirstForward
from foreprop.path.asyncdevice import HOSTS, TorchAccelerator
from foreprop.path.waiting import (
    is_differentiable,
    is_waiting,
    make_wait,
    no_answer,
    refuse_to_be_compiled,
    stop_waiting,
)

Mark = Any
"""A moment by a `Clock`."""


class Clock(Protocol):
    """When the device gets to what the host tells it."""

    def mark(self) -> Mark: ...

    def settle(self) -> None:
        """Block until the device has done all that it was told."""

    def seconds(self, earlier: Mark, later: Mark) -> float:
        """Between two marks, after `settle`."""


class HostClock:
    """A CPU does at once what it is told."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def settle(self) -> None:
        """There is nothing to wait for."""

    def seconds(self, earlier: Mark, later: Mark) -> float:
        return float(later - earlier)


class DeviceClock:
    """Events among a device's work, which the host does not wait for."""

    def __init__(self, device: TorchAccelerator) -> None:
        self.device = device
        self.settle = device.synchronize

    def mark(self) -> Mark:
        return self.device.mark(timed=True)

    def seconds(self, earlier: Mark, later: Mark) -> float:
        return float(earlier.elapsed_time(later)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The host's where torch has no events for the device."""
    if device.type not in HOSTS and (found := TorchAccelerator(device)).has_events:
        return DeviceClock(found)
    return HostClock()


class Watch:
    """Notes when arrays are first used, and when their gradients are ready, while it watches.

    First uses are seen as a session sees them (`path.waiting`): inside the model's forward
    pass every use counts, outside of it those that are differentiated.
    """

    def __init__(
        self, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], clock: Clock
    ) -> None:
        self.used: dict[int, Mark] = {}
        self.ready: dict[int, Mark] = {}
        self._model = model
        self._arrays = [_Array(number, p, self) for number, p in enumerate(parameters)]
        self.mark = clock.mark
        self._in_forward = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        model: Any = self._model
        watch: Any = self  # a hook's source, of which FirstForward uses one method
        with contextlib.ExitStack() as undo:
            undo.callback(self.forward_ended)
            undo.callback(watch_entries(self))
            undo.callback(model.register_forward_pre_hook(FirstForward(watch)).remove)
            for array in self._arrays:
                undo.callback(array.hook())
                make_wait(array.parameter, array)
            yield

    def forward_started(self) -> None:
        """What was used before the model's first forward pass does not count."""
        if self._in_forward:
            return
        self._in_forward = True
        self.used.clear()
        for array in self._arrays:
            if not is_waiting(array.parameter):
                make_wait(array.parameter, array)

    def forward_ended(self) -> None:
        for array in self._arrays:
            stop_waiting(array.parameter)

    def compiled_code_entered(self, everything: bool) -> None:
        """Compiled code uses all that has not been used."""
        for array in self._arrays:
            if is_waiting(array.parameter):
                stop_waiting(array.parameter)
                self.used[array.number] = self.mark()

    def counts(self, result: Any) -> bool:
        """Whether an operation with this result is a use."""
        return self._in_forward or is_differentiable(result)


class _Array:
    """One array, waiting for its first use."""

    def __init__(self, number: int, parameter: torch.nn.Parameter, watch: Watch) -> None:
        self.number = number
        self.parameter = parameter
        self._watch = watch
        self._asked: Mark = None

    def hook(self) -> Callable[[], None]:
        """Note gradients until what is returned is called."""
        register: Any = self.parameter.register_post_accumulate_grad_hook
        remove: Callable[[], None] = register(self._on_gradient).remove
        return remove

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._watch.ready[self.number] = self._watch.mark()  # of several passes the last one

    answer = staticmethod(no_answer)
    meets_compiler = staticmethod(refuse_to_be_compiled)

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        self._asked = self._watch.mark()
        stop_waiting(self.parameter)
        return True

    def after_use(self, result: Any) -> None:
        if self._watch.counts(result):
            self._watch.used[self.number] = self._asked
        else:
            make_wait(self.parameter, self)


class Passes:
    """Runs a user's forward pass, and the backward pass from its loss, as one step.

    ``backward_passes`` of both make a step; all but the last backward pass count as forward time,
    as no gradient is complete before the last.
    """

    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        untouched: Untouched,
        clock: Clock,
        *,
        backward_passes: int,
    ) -> None:
        self._forward = forward
        self._untouched = untouched
        self._clock = clock
        self._backward_passes = backward_passes

    def run_first(self) -> None:
        """A pass that nobody times, from which other tensors with gradients become known."""
        loss = self._forward()
        self._untouched.keep_gradients_behind(loss)
        self._backward(loss)

    def run(self) -> tuple[float, float]:
        """Seconds of the forward and of the backward pass."""
        started, turned, ended = self._marks(lambda: None)
        return self._clock.seconds(started, turned), self._clock.seconds(turned, ended)

    def run_watched(self, watch: Watch) -> PassRecord:
        """The same, and what the watch saw. Gradients stay until the next pass."""
        with watch.watching():
            started, turned, ended = self._marks(watch.forward_ended)
        seconds = self._clock.seconds
        return PassRecord(
            forward_s=seconds(started, turned),
            backward_s=seconds(turned, ended),
            used_s={array: seconds(started, mark) for array, mark in watch.used.items()},
            ready_s={array: seconds(turned, mark) for array, mark in watch.ready.items()},
        )

    def _marks(self, forward_ended: Callable[[], None]) -> tuple[Mark, Mark, Mark]:
        """When the forward pass began and ended, and the backward pass ended."""
        self._untouched.clear_gradients()
        self._clock.settle()
        started = self._clock.mark()
        for _ in range(self._backward_passes - 1):
            self._backward(self._forward())
        loss = self._forward()
        forward_ended()
        turned = self._clock.mark()
        self._backward(loss)
        ended = self._clock.mark()
        self._clock.settle()
        return started, turned, ended

    @staticmethod
    def _backward(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


class Untouched:
    """Remembers values, buffers, gradients, attributes and the states of random generators.

    Gradients are taken away at once. Values are kept in host memory. Attributes that a forward
    pass sets on a module (a hidden state, a counter) get their old values; what it changes inside
    of a list or dictionary of its own is not known here.
    """

    def __init__(self, model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
        # scripted modules have no attributes of their own in Python
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._attributes = [(m, dict(vars(m)), dict(m._buffers)) for m in modules]
        tensors = {id(t): t for t in (*model.parameters(), *parameters, *model.buffers())}
        self._values = [(t, t._version, t.detach().to("cpu", copy=True)) for t in tensors.values()]
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._restore_chance = _chance()
        self._keep_gradients(t for t in tensors.values() if t.is_leaf)

    def keep_gradients_behind(self, loss: torch.Tensor) -> None:
        """Also those of whatever else ``loss.backward()`` would give a gradient to."""
        self._keep_gradients(_leaves(loss))

    def _keep_gradients(self, leaves: Iterable[torch.Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def clear_gradients(self) -> None:
        """As ``optimizer.zero_grad()`` does."""
        for leaf, _ in self._gradients.values():
            leaf.grad = None

    def restore(self) -> None:
        for module, attributes, its_buffers in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(its_buffers)
        with torch.no_grad():
            for tensor, version, value in self._values:
                if _has_changed(tensor, version, value):
                    tensor.copy_(value)
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        self._restore_chance()


def _has_changed(tensor: torch.Tensor, version: int, value: torch.Tensor) -> bool:
    if tensor._version != version:
        return True
    # what is written through .data leaves the version as it is
    return tensor.layout == torch.strided and not torch.equal(tensor.detach().cpu(), value)


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that gather gradients, found in the graph behind the loss."""
    seen: set[Any] = set()
    rest: list[Any] = [loss.grad_fn]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        rest += [following for following, _ in node.next_functions]


def _chance() -> Callable[[], None]:
    """The random generators of torch, Python and NumPy; call what is returned to put them back."""
    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    device: Any = getattr(torch, kind.type)
    started = hasattr(device, "get_rng_state_all") and device.is_initialized()
    on_devices = device.get_rng_state_all() if started else []
    on_cpu, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        if on_devices:
            device.set_rng_state_all(on_devices)
        random.setstate(pythons)
        np.random.set_state(numpys)

    return restore
