"""Forward and backward passes of a user's model, timed as they are or watched array by array.

A watch slows passes down, so the times are those of passes without one (`Passes`), shared out over
the arrays as the watched ones say (`attribute`). What a pass may change is put back afterwards
(`Untouched`).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foreprop.engine.asyncdevice import HOSTS, TorchAccelerator
from foreprop.params.interception import watch_entries
from foreprop.params.modelhooks import FirstForward
from foreprop.params.waiting import (
    is_differentiable,
    is_waiting,
    make_wait,
    no_answer,
    refuse_to_be_compiled,
    stop_waiting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One forward and backward pass; arrays go by numbers.

    ``used_s`` are first uses since the forward pass began, in their order; ``ready_s`` says when
    gradients were ready, since the backward pass began.
    """

    forward_s: float
    backward_s: float
    used_s: Mapping[int, float]
    ready_s: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The arrays' parts of a step, medians over some passes.

    ``order`` has the arrays that got a gradient, in the order of their first use; ``forward_s`` and
    ``backward_s`` are theirs.
    """

    order: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    before_first_use_s: float
    after_last_gradient_s: float


def attribute(records: Sequence[PassRecord], *, forward_s: float, backward_s: float) -> Attribution:
    """Share out ``forward_s`` and ``backward_s`` over the arrays as the recorded passes say.

    The forward pass works for an array from its first use until the next array's. The backward pass
    works for it from when all later arrays have their gradients until it has its own, too: where
    several are ready at once (an LSTM's), the first in forward order need not be the last.
    """
    with_gradient = set(itertools.chain.from_iterable(record.ready_s for record in records))
    used = dict.fromkeys(itertools.chain.from_iterable(record.used_s for record in records))
    order = [array for array in used if array in with_gradient]
    order += sorted(with_gradient.difference(order))
    forward = [_forward_parts(record, set(order)) for record in records]
    backward = [_backward_parts(record, order) for record in records]
    before_s, *forwards_s = _shared_out(
        [[before, *(parts.get(array, 0.0) for array in order)] for before, parts in forward],
        forward_s,
    )
    after_s, *backwards_s = _shared_out(backward, backward_s)
    return Attribution(
        order=tuple(order),
        forward_s=tuple(forwards_s),
        backward_s=tuple(backwards_s),
        before_first_use_s=before_s,
        after_last_gradient_s=after_s,
    )


def _forward_parts(record: PassRecord, arrays: Collection[int]) -> tuple[float, dict[int, float]]:
    marks = [(array, at_s) for array, at_s in record.used_s.items() if array in arrays]
    ends_s = [at_s for _, at_s in marks] + [record.forward_s]
    lasted = {array: end_s - at_s for (array, at_s), end_s in zip(marks, ends_s[1:], strict=True)}
    return ends_s[0], lasted


def _backward_parts(record: PassRecord, order: Sequence[int]) -> list[float]:
    """What follows the last gradient, then each array's part in forward order."""
    ready_s = [max(0.0, record.ready_s.get(array, 0.0)) for array in order]
    all_later_s = list(itertools.accumulate(reversed(ready_s), max, initial=0.0))[::-1]
    parts = [own - later for own, later in itertools.pairwise(all_later_s)]
    return [record.backward_s - all_later_s[0], *parts]


def _shared_out(passes: Sequence[Sequence[float]], total_s: float) -> list[float]:
    """The median of each column, all stretched so that they add up to ``total_s``."""
    medians = [max(0.0, statistics.median(column)) for column in zip(*passes, strict=True)]
    measured_s = sum(medians)
    return [median * total_s / measured_s if measured_s else 0.0 for median in medians]


Mark = Any


class Clock:
    """Marks the moments at which a device gets to what the host tells it; here it is the CPU.

    The seconds between two marks are known after `settle`.
    """

    def mark(self) -> Mark:
        return time.perf_counter()

    def settle(self) -> None:
        """Block until the device has done all that it was told."""

    def seconds(self, earlier: Mark, later: Mark) -> float:
        return float(later - earlier)


class DeviceClock(Clock):
    """The clock of an accelerator: events among its work, which the host does not wait for."""

    def __init__(self, device: TorchAccelerator) -> None:
        self.device = device

    def settle(self) -> None:
        self.device.synchronize()

    def mark(self) -> Mark:
        return self.device.mark(timed=True)

    def seconds(self, earlier: Mark, later: Mark) -> float:
        return float(earlier.elapsed_time(later)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The device's clock; the host's if torch has no events for the device."""
    if device.type not in HOSTS and (found := TorchAccelerator(device)).has_events:
        return DeviceClock(found)
    return Clock()


class Watch:
    """Notes when arrays are first used, and when their gradients are ready, while it watches.

    First uses are seen as a session sees them (`params.waiting`): inside the model's forward
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
        with contextlib.ExitStack() as undo:
            undo.callback(self.forward_ended)
            undo.callback(watch_entries(self.compiled_code_entered))
            first = FirstForward(self.forward_started)
            undo.callback(model.register_forward_pre_hook(first).remove)
            for array in self._arrays:
                undo.callback(array.hook())
                make_wait(array.parameter, array)
            yield

    def forward_started(self) -> None:
        if self._in_forward:
            return
        self._in_forward = True
        self.used.clear()  # uses before the model's first forward pass do not count
        for array in self._arrays:
            if not is_waiting(array.parameter):
                make_wait(array.parameter, array)

    def forward_ended(self) -> None:
        for array in self._arrays:
            stop_waiting(array.parameter)

    def compiled_code_entered(self, everything: bool) -> None:
        for array in self._arrays:
            if is_waiting(array.parameter):  # compiled code may use any of them
                stop_waiting(array.parameter)
                self.used[array.number] = self.mark()

    def counts(self, result: Any) -> bool:
        return self._in_forward or is_differentiable(result)


class _Array:
    """One array, which waits for its first use; a `params.waiting` answer."""

    def __init__(self, number: int, parameter: torch.nn.Parameter, watch: Watch) -> None:
        self.number = number
        self.parameter = parameter
        self._watch = watch
        self._asked: Mark = None

    def hook(self) -> Callable[[], None]:
        """Note gradients until the returned function is called."""

        def note_gradient(_: torch.Tensor) -> None:
            self._watch.ready[self.number] = self._watch.mark()  # of several passes the last one

        register: Any = self.parameter.register_post_accumulate_grad_hook
        remove: Callable[[], None] = register(note_gradient).remove
        return remove

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
    """Runs a user's forward pass, and the backward pass from its loss, as a step.

    So many ``backward_passes`` of both make a step. All but the last backward pass count as forward
    time, as no gradient is complete before the last.
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
        """Run a pass without times, which shows what other tensors get gradients."""
        loss = self._forward()
        self._untouched.keep_gradients_behind(loss)
        self._backward(loss)

    def run(self) -> tuple[float, float]:
        started, turned, ended = self._marks(lambda: None)
        return self._clock.seconds(started, turned), self._clock.seconds(turned, ended)

    def run_watched(self, watch: Watch) -> PassRecord:
        """Run a step that is watched. Gradients stay until the next one."""
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
    """Remembers values, buffers, gradients, attributes and random generators, and puts them back.

    Gradients are taken away at once. Values are kept in host memory. Attributes that a forward
    pass sets on a module (a hidden state, a counter) get their old values back; what it changes
    inside of a list or dictionary of its own stays changed.
    """

    def __init__(self, model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
        # scripted modules have no attributes of their own in Python
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._attributes = [(m, dict(vars(m)), dict(m._buffers)) for m in modules]
        tensors = {id(t): t for t in (*model.parameters(), *parameters, *model.buffers())}
        self._values = [(t, t._version, t.detach().to("cpu", copy=True)) for t in tensors.values()]
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._restore_generators = _random_generators()
        self._keep_gradients(t for t in tensors.values() if t.is_leaf)

    def keep_gradients_behind(self, loss: torch.Tensor) -> None:
        """Remember the gradients of all else that ``loss.backward()`` gives a gradient to."""
        self._keep_gradients(_leaves(loss))

    def _keep_gradients(self, leaves: Iterable[torch.Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def clear_gradients(self) -> None:
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
                changed = tensor._version != version
                if not changed and tensor.layout == torch.strided:
                    # a write through .data leaves the version as it is
                    changed = not torch.equal(tensor.detach().cpu(), value)
                if changed:
                    tensor.copy_(value)
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        self._restore_generators()


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors in the graph behind the loss that accumulate gradients."""
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


def _random_generators() -> Callable[[], None]:
    """Remember the states of torch's, Python's and NumPy's; the returned function restores them."""
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
