"""Where the bytes of a parameter are that is on a GPU, not contiguous, or on no device at all.

Only this module knows about streams and events. A GPU's parameter is staged through pinned host
memory, and its gradient is ready when the copy's event has completed, not when the hook ran: a
thread waits for the events, in order, and the backward pass goes on. With collectives between GPUs
it stays where it is, and the same thread waits until the gradient is there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from foreprop.errors import InternalError
from foreprop.path.memory import Ready, bytes_of


class Copier(Protocol):
    """Copies beside the computation: `torch.cuda` in the one implementation."""

    def mark(self, computed: torch.Tensor) -> Any:
        """An event with ``synchronize()``: the work queued so far, and so this tensor, is done."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin to copy what ``source`` will hold when the work queued so far is done.

        Returns an event with ``synchronize()``.
        """


class CudaCopier:
    """Copies on a stream of its own, which waits for the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda
        self._stream = self._cuda.Stream(device)

    def mark(self, computed: torch.Tensor) -> Any:
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(computed.device))
        return event

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self._stream.wait_stream(self._cuda.current_stream(source.device))
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            event = self._cuda.Event()
            event.record(self._stream)
        return event


class StagedMemory:
    """Another layout, or a device without streams: through contiguous host memory."""

    is_staged = True
    receives_values = True

    def __init__(self, parameter: torch.Tensor, *, pinned: bool = False) -> None:
        self._parameter = parameter
        shape, dtype = parameter.shape, parameter.dtype
        self._values = torch.empty(shape, dtype=dtype, pin_memory=pinned)
        self.gradient = torch.empty(shape, dtype=dtype, pin_memory=pinned)
        self.values = bytes_of(self._values)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        self.gradient.copy_(gradient)
        ready(bytes_of(self.gradient))

    def await_staged(self) -> None:
        pass

    def before_sending_values(self) -> None:
        self._values.copy_(self._parameter.detach())

    def land(self) -> None:
        with torch.no_grad():
            self._parameter.copy_(self._values, non_blocking=True)


class AsyncStagedMemory:
    """A GPU's parameter: the gradient enters the queue when its copy has completed.

    The next replies may overwrite ``values`` only after the next gradient's event, which follows
    `land`'s copy on the device, so that needs no event of its own.
    """

    is_staged = True
    receives_values = True

    def __init__(self, parameter: torch.Tensor, stager: Stager, *, pinned: bool = True) -> None:
        self._host = StagedMemory(parameter, pinned=pinned)
        self._copies = StagedCopies(stager)
        self.values = self._host.values

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        event = self._copies.copier.start(self._host.gradient, gradient)
        self._copies.begin(event, lambda: ready(bytes_of(self._host.gradient)))

    def await_staged(self) -> None:
        self._copies.wait()

    def before_sending_values(self) -> None:
        self._host.before_sending_values()

    def land(self) -> None:
        self._host.land()


class DeviceMemory:
    """A GPU's parameter whose gradient stays there: ``ready`` is given a tensor of its bytes.

    That is when the backward pass has computed it, and used the parameter for the last time.
    """

    values = memoryview(b"")
    is_staged = True
    receives_values = False

    def __init__(self, stager: Stager) -> None:
        self._copies = StagedCopies(stager)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        flat = gradient.contiguous().view(-1).view(torch.uint8)
        self._copies.begin(self._copies.copier.mark(flat), lambda: ready(flat))

    def await_staged(self) -> None:
        self._copies.wait()

    def before_sending_values(self) -> None:
        """Every rank has its own."""

    def land(self) -> None:
        """They are updated where they are."""


class Stager:
    """One thread that waits for copies' events, in the order in which they were started."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self._started: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="foreprop-stage", daemon=True)
        self._thread.start()

    def submit(self, event: Any, complete: Callable[[], None]) -> None:
        self._started.put((event, complete))

    def stop(self) -> None:
        self._started.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._started.get()) is not None:
            event, complete = job
            event.synchronize()
            complete()


class StagedCopies:
    """One parameter's turns with a stager, one after the other."""

    def __init__(self, stager: Stager) -> None:
        self.copier = stager.copier
        self._stager = stager
        self._over = threading.Event()
        self._over.set()

    def begin(self, event: Any, complete: Callable[[], None]) -> None:
        """Call ``complete`` in the stager's thread, when the event has completed."""
        self._over.clear()

        def end() -> None:
            try:
                complete()
            finally:
                self._over.set()

        self._stager.submit(event, end)

    def wait(self) -> None:
        """Block until the last one is over."""
        self._over.wait()


class NoMemory:
    """Of a remote table, which is on the meta device: the servers have its rows."""

    values = memoryview(b"")
    is_staged = False
    receives_values = False

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        raise InternalError("a remote table's gradient is not sent as a whole")

    def await_staged(self) -> None:
        pass

    def before_sending_values(self) -> None:
        pass

    def land(self) -> None:
        pass
