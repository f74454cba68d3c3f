"""Where the bytes of a parameter are that is on a device, not contiguous, or nowhere at all.

A device's parameter is staged through pinned host memory (`path.asyncdevice`), and its gradient is
ready when the copy's event has completed, not when the hook ran: a thread waits for the events, in
order, and the backward pass goes on. With collectives between GPUs it stays where it is, and the
same thread waits until the gradient is there.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import torch

from foreprop.config import launch_info
from foreprop.errors import InternalError
from foreprop.path.asyncdevice import Accelerator, TorchAccelerator
from foreprop.path.memory import Memory, Ready, bytes_of


class StagedMemory:
    """Another layout, or a device without streams: through contiguous host memory."""

    is_staged = True
    receives_values = True

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._values = torch.empty(parameter.shape, dtype=parameter.dtype)
        self._gradient = torch.empty(parameter.shape, dtype=parameter.dtype)
        self.values = bytes_of(self._values)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        self._gradient.copy_(gradient)
        ready(bytes_of(self._gradient))

    def pass_by(self, ready: Callable[[], None]) -> None:
        ready()

    def await_staged(self) -> None:
        pass

    def before_sending_values(self) -> None:
        self._values.copy_(self._parameter.detach())

    def land(self) -> None:
        with torch.no_grad():
            self._parameter.copy_(self._values)


class AsyncStagedMemory:
    """A device's parameter: the gradient enters the queue when its copy has completed.

    The next replies may overwrite ``values`` only after the next gradient's event, or that of
    `pass_by`, which follows `land`'s copy on the device, so that needs no event of its own.
    """

    is_staged = True
    receives_values = True

    def __init__(self, parameter: torch.Tensor, stager: Stager) -> None:
        self._parameter = parameter
        self.accelerator = self._device = stager.device
        self._turns = StagedTurns(stager)
        self._training: Any = None
        """The stream on which the parameter is trained: where its last gradient was computed."""

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

    # Of this, what has found no room (`asyncdevice.PinnedRoom`) is not, and copies block.
    @functools.cached_property
    def _gradient_is_pinned(self) -> bool:
        return self._device.is_pinned(self._gradient)

    @functools.cached_property
    def _values_are_pinned(self) -> bool:
        return self._device.is_pinned(self._values)

    @functools.cached_property
    def values(self) -> memoryview:
        return bytes_of(self._values)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        device = self._device
        self._training = here = device.current_stream()
        if self._gradient_is_pinned:
            event = device.start(self._gradient, gradient, here)
            self._turns.begin(event, lambda: ready(self._gradients_bytes))
            return

        def copy() -> None:
            self._gradient.copy_(gradient)
            ready(self._gradients_bytes)

        self._turns.begin(device.mark(), copy)

    def pass_by(self, ready: Callable[[], None]) -> None:
        self._turns.begin(self._device.mark(), ready)

    def await_staged(self) -> None:
        self._turns.wait()

    def before_sending_values(self) -> None:
        self._values.copy_(self._parameter.detach())

    def land(self) -> None:
        """Whoever uses it first may do so on another stream than who trains it: neither is early.

        In plain training the optimizer would have updated it on the latter.
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


class DeviceMemory:
    """A device's parameter whose gradient stays there: ``ready`` is given a tensor of its bytes.

    That is when the backward pass has computed it, and used the parameter for the last time.
    """

    values = memoryview(b"")
    is_staged = True
    receives_values = False

    def __init__(self, stager: Stager) -> None:
        self.accelerator = self._device = stager.device
        self._turns = StagedTurns(stager)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        flat = gradient.contiguous().view(-1).view(torch.uint8)
        self._turns.begin(self._device.mark(), lambda: ready(flat))

    def pass_by(self, ready: Callable[[], None]) -> None:
        self._turns.begin(self._device.mark(), ready)

    def await_staged(self) -> None:
        self._turns.wait()

    def before_sending_values(self) -> None:
        """Every rank has its own."""

    def land(self) -> None:
        """They are updated where they are."""


class Stager:
    """One thread that waits for copies' events, in the order in which they were started."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self._started: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="foreprop-stage", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._started.put(job)

    def stop(self) -> None:
        self._started.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._started.get()) is not None:
            job()
            del job  # and with it the gradient


class StagedTurns:
    """One parameter's, with a stager, one after the other."""

    def __init__(self, stager: Stager) -> None:
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

    def wait(self) -> None:
        """Block until the last one is over; raises what it has failed with."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure


class NoMemory:
    """Of a remote table, which is on the meta device: the servers have its rows."""

    values = memoryview(b"")
    is_staged = False
    receives_values = False

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        raise InternalError("a remote table's gradient is not sent as a whole")

    def pass_by(self, ready: Callable[[], None]) -> None:
        ready()

    def await_staged(self) -> None:
        pass

    def before_sending_values(self) -> None:
        pass

    def land(self) -> None:
        pass


def staged_memory_of(
    parameter: torch.Tensor,
    stagers: dict[torch.device, Stager],
    *,
    stays: bool,
    pinned_bytes: int | None = None,
) -> Memory:
    """Not in the host's memory, or not contiguous there. ``stays``: on its GPU."""
    device = parameter.device
    if parameter.is_meta:
        return NoMemory()
    if device not in stagers:
        if device.type == "cpu":
            return StagedMemory(parameter)
        found = TorchAccelerator(device, pinned_bytes)
        if not found.has_streams:
            return StagedMemory(parameter)
        found.check_rank(launch_info().local_rank)
        stagers[device] = Stager(found)
    return DeviceMemory(stagers[device]) if stays else AsyncStagedMemory(parameter, stagers[device])
