"""Where a parameter's bytes are if it is on a device, not contiguous, or nowhere at all.

A device's parameter is staged through pinned host memory (`engine.asyncdevice`), and its gradient
is ready when the copy is over, not when the hook ran: the backward pass goes on. The native plane
looks for a number that the device copies behind it; for other engines a thread waits for events, in
order. With collectives between GPUs it stays where it is, and that thread waits until it is there.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from foreprop.config import launch_info
from foreprop.engine.asyncdevice import TorchAccelerator
from foreprop.engine.memory import Copying, Memory, Ready, bytes_of
from foreprop.errors import InternalError

_NUMBERS = 1024  # made by one kernel, which waits for those that compute, as copies do not


class CountingAccelerator(TorchAccelerator):
    """A device that shows in host memory how many copies are over, to who waits for no event."""

    def __init__(self, device: torch.device, pinned_bytes: int | None = None) -> None:
        super().__init__(device, pinned_bytes)
        self._counting = threading.Lock()
        self._numbers: torch.Tensor | None = None
        self._count = 0

    @functools.cached_property
    def word(self) -> torch.Tensor:
        """Host memory that shows how many copies of `start_counted` are over."""
        made = self.host_memory((), torch.int64).zero_()
        return cast(torch.Tensor, vars(self).setdefault("_only_word", made))

    def start_counted(self, copies: Iterable[tuple[Any, Any]], here: Any) -> Copying:
        """Begin as `start` does with each target and source, and have it shown when all are over.

        All that ``here`` had been given is over by then, too. Only if ``word`` is pinned.
        """
        with self._counting:  # numbers and copies are in one order
            self.join(self._copying, here)
            with self._module.stream(self._copying):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                if self._numbers is None:  # on the device, from where copies need not block
                    self._numbers = torch.arange(1 - _NUMBERS, 1, device=self.device)
                if not self._count % _NUMBERS:
                    self._numbers.add_(_NUMBERS)
                number = self._numbers[self._count % _NUMBERS]
                self.word.copy_(number, non_blocking=True)
            self._count += 1
            return Copying(self.word.data_ptr(), self._count, self._copying.query)


class StagedMemory(Memory):
    """Contiguous host memory for another layout, or for a device without streams."""

    is_staged = True

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._values = torch.empty(parameter.shape, dtype=parameter.dtype)
        self._gradient = torch.empty(parameter.shape, dtype=parameter.dtype)
        self.values = bytes_of(self._values)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        self._gradient.copy_(gradient)
        ready(bytes_of(self._gradient))

    def before_sending_values(self) -> None:
        self._values.copy_(self._parameter.detach())

    def land(self) -> None:
        with torch.no_grad():
            self._parameter.copy_(self._values)


class DeviceTurns(Memory):
    """Memory of a device's parameter, whose jobs run one by one as their events complete."""

    is_staged = True

    def __init__(self, stager: Stager) -> None:
        self.accelerator = self._device = stager.device
        self._stager = stager
        self._over = threading.Event()
        self._over.set()
        self._failure: BaseException | None = None

    def begin(self, event: Any, complete: Callable[[], None]) -> None:
        """Call ``complete`` in the stager's thread, when the event has completed."""
        self._over.clear()

        def job() -> None:
            try:
                event.synchronize()
                complete()
            except BaseException as error:  # the device's, or the session has failed meanwhile
                self._failure = error
            finally:
                self._over.set()

        self._stager.submit(job)

    def pass_by(self, ready: Callable[[], None]) -> None:
        self.begin(self._device.mark(), ready)

    def await_staged(self) -> None:
        """Block until the last job is over; raises what it has failed with."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure


class AsyncStagedMemory(DeviceTurns):
    """A device's parameter: the gradient enters the queue when its copy has completed.

    The next replies may overwrite ``values`` only after the next gradient's copy, or the event of
    `pass_by`, which follows `land`'s copy on the device, so that needs no event of its own.
    """

    def __init__(self, parameter: torch.Tensor, stager: Stager) -> None:
        super().__init__(stager)
        self._parameter = parameter
        self._training: Any = None
        """The stream that trains the parameter: its last gradient was computed there."""

    # Made when they are first needed: who only sends, or only receives, holds one of them. Several
    # servers' threads may ask for the values at once, and since Python 3.12 nothing holds the
    # second one: what the first has made is kept.
    @functools.cached_property
    def _values(self) -> torch.Tensor:
        made = self._device.host_memory(self._parameter.shape, self._parameter.dtype)
        return cast(torch.Tensor, vars(self).setdefault("_only_values", made))

    @functools.cached_property
    def _gradient(self) -> torch.Tensor:
        return self._device.host_memory(self._parameter.shape, self._parameter.dtype)

    @functools.cached_property
    def _gradients_bytes(self) -> memoryview:
        return bytes_of(self._gradient)

    # Of this, what has found no room (`asyncdevice.PinnedBudget`) is not, and copies block.
    @functools.cached_property
    def _gradient_is_pinned(self) -> bool:
        return self._device.is_pinned(self._gradient)

    @property
    def _is_counted(self) -> bool:
        return self.counts and self._device.is_pinned(self._device.word)

    @functools.cached_property
    def _values_are_pinned(self) -> bool:
        return self._device.is_pinned(self._values)

    @functools.cached_property
    def values(self) -> memoryview:  # type: ignore[override]
        return bytes_of(self._values)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        device = self._device
        self._training = here = device.current_stream()
        self.copying = None
        if self._gradient_is_pinned and self._is_counted:
            self.copying = device.start_counted([(self._gradient, gradient)], here)
            ready(self._gradients_bytes)
            return
        if self._gradient_is_pinned:
            event = device.start(self._gradient, gradient, here)
            self.begin(event, lambda: ready(self._gradients_bytes))
            return

        def copy() -> None:
            self._gradient.copy_(gradient)
            ready(self._gradients_bytes)

        self.begin(device.mark(), copy)

    def pass_by(self, ready: Callable[[], None]) -> None:
        self.copying = None
        if not self._is_counted:
            super().pass_by(ready)
            return
        self.copying = self._device.start_counted((), self._device.current_stream())
        ready()

    def before_sending_values(self) -> None:
        self._values.copy_(self._parameter.detach())

    def land(self) -> None:
        """Copy the values to the device, on the stream that uses them first.

        That may be another one than trains the parameter. Then each waits for the other, as if the
        optimizer had updated it on the latter.
        """
        device = self._device
        here = device.current_stream()
        elsewhere = self._training is not None and self._training != here
        if elsewhere:
            device.join(here, self._training)
        with torch.no_grad():
            self._parameter.copy_(self._values, non_blocking=self._values_are_pinned)
        if elsewhere:
            device.join(self._training, here)


class DeviceMemory(DeviceTurns):
    """A device's parameter whose gradient stays there, for collectives between GPUs.

    ``ready`` is given a tensor of the gradient's bytes, when the backward pass has computed it, and
    used the parameter for the last time. Every rank updates its own, where it is.
    """

    receives_values = False

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        flat = gradient.contiguous().view(-1).view(torch.uint8)
        self.begin(self._device.mark(), lambda: ready(flat))


class Stager:
    """A thread that waits for copies' events, in order; it begins with the first one."""

    def __init__(self, device: CountingAccelerator) -> None:
        self.device = device
        self._started: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="foreprop-stage", daemon=True)

    def submit(self, job: Callable[[], None]) -> None:
        self._started.put(job)
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def stop(self) -> None:
        self._started.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._started.get()) is not None:
            job()
            del job  # and with it the gradient


class NoMemory(Memory):
    """The memory of a remote table, which is on the meta device: servers have its rows."""

    receives_values = False

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        raise InternalError("a remote table's gradient is not sent as a whole")


def staged_memory_of(
    parameter: torch.Tensor,
    stagers: dict[torch.device, Stager],
    *,
    stays: bool,
    pinned_bytes: int | None = None,
) -> Memory:
    """The memory of a parameter that is not contiguous in the host's.

    With ``stays`` its gradient stays on its GPU.
    """
    device = parameter.device
    if parameter.is_meta:
        return NoMemory()
    if device not in stagers:
        if device.type == "cpu":
            return StagedMemory(parameter)
        found = CountingAccelerator(device, pinned_bytes)
        if not found.has_streams:
            return StagedMemory(parameter)
        found.check_rank(launch_info().local_rank)
        stagers[device] = Stager(found)
    return DeviceMemory(stagers[device]) if stays else AsyncStagedMemory(parameter, stagers[device])
