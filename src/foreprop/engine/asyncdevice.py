"""A device that computes beside the host, through what torch offers alike for all of them.

CUDA, ROCm, XPU, NPU, MTIA, MPS and whoever registers a backend with torch have a module of one
shape (`torch.get_device_module`): ``Stream``, ``Event``, ``current_stream``, ``stream``. What one
of them lacks is found out here, once. Without streams copies hold up who asks for them. Without
pinned memory they do too, but in a thread beside the training one: a copy that does not block is
only ever asked for where the host's memory is pinned, because some backends then read it late
(pytorch/pytorch#189690).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from foreprop.config import LOGGER


class TorchAccelerator:
    """Streams and events of one device, by the module that torch has for its kind."""

    def __init__(self, device: torch.device, pinned_bytes: int | None = None) -> None:
        """``pinned_bytes`` bounds what may be pinned; without it all is that is asked for."""
        self.device = device
        self._budget = None if pinned_bytes is None else PinnedBudget(pinned_bytes)
        self._module: Any = getattr(torch, device.type, None)
        self.has_streams = all(hasattr(self._module, name) for name in _STREAMS)
        self.has_events = hasattr(self._module, "Event") and hasattr(self._module, "synchronize")
        """Whether the device has events; without streams they are among all of its work."""
        self.pins = self.has_streams and can_pin()
        """Whether host memory can be pinned, so that copies need not block."""
        missing = (("streams", self.has_streams), ("pinned memory", self.pins))
        self.lacks = tuple(what for what, there in missing if not there)
        """Which of streams and pinned memory the device lacks, in words."""

    @functools.cached_property
    def _copying(self) -> Any:
        """The stream on which gradients are copied to the host."""
        # threads may ask at once, and since Python 3.12 nothing holds the second: one is kept
        return vars(self).setdefault("_only_copying", self._module.Stream(self.device))

    def host_memory(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Make host memory, pinned if it can be and ``pinned_bytes`` has room for it."""
        memory = torch.empty(tuple(shape), dtype=dtype)
        if not self.pins or (self._budget is not None and not self._budget.take(memory.nbytes)):
            return memory
        pinned = memory.pin_memory()
        if self._budget is not None:
            weakref.finalize(pinned, self._budget.give_back, pinned.nbytes).atexit = False
        return pinned

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether memory of `host_memory` is pinned; copies from or to other memory block."""
        return self.pins and (self._budget is None or memory.is_pinned())

    @functools.cached_property
    def _new_event(self) -> Callable[[], Any]:
        """Makes an event that lets a thread sleep while it waits, where the backend has such."""
        try:  # CUDA's other events keep a processor busy while a thread waits
            self._module.Event(blocking=True)
        except TypeError:  # of a backend without a choice
            return cast(Callable[[], Any], self._module.Event)
        return functools.partial(self._module.Event, blocking=True)

    def mark(self, *, timed: bool = False) -> Any:
        """Record an event after all that this thread has queued; it has ``synchronize()``."""
        event = self._module.Event(enable_timing=True) if timed else self._new_event()
        return self._recorded(event, self.current_stream())

    def start(self, target: torch.Tensor, source: torch.Tensor, here: Any) -> Any:
        """Begin to copy ``source`` to pinned host memory, once ``here`` has computed it.

        ``here`` is this thread's stream. Returns the event at the copy's end, until which the
        caller keeps ``source``.
        """
        self.join(self._copying, here)
        with self._module.stream(self._copying):
            target.copy_(source, non_blocking=True)
        return self._recorded(self._new_event(), self._copying)

    def _recorded(self, event: Any, stream: Any) -> Any:
        if self.has_streams:
            event.record(stream)
        else:
            event.record()
        return event

    def current_stream(self) -> Any:
        """This thread's stream; None where there are no streams."""
        return self._module.current_stream(self.device) if self.has_streams else None

    def join(self, stream: Any, other: Any) -> None:
        """Have ``stream`` wait, from now on, for what is queued on ``other``."""
        stream.wait_stream(other)

    def own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which this thread has a new stream, and waits for its own work only."""
        context: contextlib.AbstractContextManager[Any] = self._module.stream(
            self._module.Stream(self.device)
        )
        return context

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep memory that another stream has given until this thread's has used it, too."""
        tensor.record_stream(self.current_stream())

    def finish(self) -> None:
        """Block until what this thread has queued is done."""
        self.mark().synchronize()  # a stream's own keeps a processor busy

    def synchronize(self) -> None:
        """Block until the device has done all that it was told."""
        if self.has_streams:
            self._module.synchronize(self.device)
        else:
            self._module.synchronize()

    def check_rank(self, local_rank: int) -> None:
        """Warn if the worker is on the node's first device where it should have another one."""
        count = self._module.device_count() if hasattr(self._module, "device_count") else 1
        if self.device.index == 0 and local_rank > 0 and count > 1:
            _warn_of_shared(self.device, local_rank, count)

    @property
    def name(self) -> str:
        """What the maker calls the device, if torch tells it."""
        tell: Any = getattr(self._module, "get_device_name", str)
        return str(tell(self.device))


class PinnedBudget:
    """The bytes that may still be pinned. Any thread."""

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._counting = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Reserve so many bytes; returns whether there was room."""
        with self._counting:
            fits = size_bytes <= self._left_bytes
            self._left_bytes -= size_bytes if fits else 0
        return fits

    def give_back(self, size_bytes: int) -> None:
        with self._counting:
            self._left_bytes += size_bytes


@functools.cache  # once
def _warn_of_shared(device: torch.device, local_rank: int, count: int) -> None:
    LOGGER.warning(
        "parameters are on %s, but LOCAL_RANK is %d and torch sees %d devices: workers of this node"
        " share one. Move the model to torch.device(%r, int(os.environ['LOCAL_RANK'])) before"
        " parallelize()",
        device,
        local_rank,
        count,
        device.type,
    )


_STREAMS = ("Stream", "Event", "current_stream", "stream")
HOSTS = frozenset({"cpu", "meta"})
"""Kinds of devices that do not compute beside the host."""


@functools.cache
def can_pin() -> bool:
    """Whether the one kind of accelerator that a process has can use pinned memory."""
    try:
        return torch.empty(1).pin_memory().is_pinned()
    except (RuntimeError, NotImplementedError):  # of torch, by the backend that has no such memory
        return False


def describe_devices(tensors: Iterable[torch.Tensor]) -> str:
    """Where parameters are, and what is lacking there, for the line that is printed at the start.

    Empty if all are in the host's memory.
    """
    text = ""
    for name in sorted({str(t.device) for t in tensors if t.device.type not in HOSTS}):
        lacks = TorchAccelerator(torch.device(name)).lacks
        how = ", copied through pinned host memory beside the computation"
        if "streams" in lacks:
            how = " (no streams there: copies hold up training)"
        elif lacks:
            how = " (no pinned memory there: a thread beside training copies)"
        text += f"; parameters on {name}{how}"
    return text
