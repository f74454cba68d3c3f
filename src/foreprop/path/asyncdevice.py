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
from typing import Any, Protocol, cast

import torch

from foreprop.config import LOGGER


class Accelerator(Protocol):
    """Streams and events of one device. An event has ``synchronize()``."""

    pins: bool
    """Whether host memory can be pinned, so that copies need not block."""
    lacks: tuple[str, ...]
    """Of streams and pinned memory, what there is not."""

    def host_memory(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Without values; pinned if that can be, and there is room for it (``pinned_bytes``)."""

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether this memory, of `host_memory`, is: else copies block."""

    def mark(self) -> Any:
        """An event: what this thread has queued so far is done."""

    def start(self, target: torch.Tensor, source: torch.Tensor, here: Any) -> Any:
        """Begin to copy to pinned host memory what ``source`` will hold when that is done.

        ``here``: this thread's stream. Returns an event. The caller keeps ``source`` until then.
        """

    def current_stream(self) -> Any:
        """This thread's."""

    def join(self, stream: Any, other: Any) -> None:
        """What is queued on ``stream`` from now on waits for what is queued on ``other``."""

    def own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A new stream that is this thread's meanwhile, so that it waits for its own work only."""

    def keep(self, tensor: torch.Tensor) -> None:
        """This thread's stream uses memory that another one gave, and may take back after that."""

    def finish(self) -> None:
        """Block until what this thread has queued is done."""


class TorchAccelerator:
    """By the module that torch has for this kind of device."""

    def __init__(self, device: torch.device, pinned_bytes: int | None = None) -> None:
        """``pinned_bytes``: so many may be pinned; None: all that is asked for."""
        self.device = device
        self._room = None if pinned_bytes is None else PinnedRoom(pinned_bytes)
        self._module: Any = getattr(torch, device.type, None)
        self.has_streams = all(hasattr(self._module, name) for name in _STREAMS)
        self.has_events = hasattr(self._module, "Event") and hasattr(self._module, "synchronize")
        """Without streams they are among all of the device's work."""
        self.pins = self.has_streams and can_pin()
        missing = (("streams", self.has_streams), ("pinned memory", self.pins))
        self.lacks = tuple(what for what, there in missing if not there)

    @functools.cached_property
    def _copying(self) -> Any:
        """Threads may ask at once, and since Python 3.12 nothing holds the second: one is kept."""
        return vars(self).setdefault("_only_copying", self._module.Stream(self.device))

    def host_memory(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(tuple(shape), dtype=dtype)
        if not self.pins or (self._room is not None and not self._room.take(memory.nbytes)):
            return memory
        pinned = memory.pin_memory()
        if self._room is not None:
            weakref.finalize(pinned, self._room.give_back, pinned.nbytes).atexit = False
        return pinned

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return self.pins and (self._room is None or memory.is_pinned())

    @functools.cached_property
    def _new_event(self) -> Callable[[], Any]:
        """For a thread to wait for: CUDA's keep a processor busy meanwhile, unless told not to."""
        try:
            self._module.Event(blocking=True)
        except TypeError:  # of a backend without a choice
            return cast(Callable[[], Any], self._module.Event)
        return functools.partial(self._module.Event, blocking=True)

    def mark(self, *, timed: bool = False) -> Any:
        event = self._module.Event(enable_timing=True) if timed else self._new_event()
        return self._recorded(event, self.current_stream())

    def start(self, target: torch.Tensor, source: torch.Tensor, here: Any) -> Any:
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
        """None where there are no streams."""
        return self._module.current_stream(self.device) if self.has_streams else None

    def join(self, stream: Any, other: Any) -> None:
        stream.wait_stream(other)

    def own_stream(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._module.stream(
            self._module.Stream(self.device)
        )
        return context

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current_stream())

    def finish(self) -> None:
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
        """The maker's, if torch tells it."""
        tell: Any = getattr(self._module, "get_device_name", str)
        return str(tell(self.device))


class PinnedRoom:
    """How many bytes may still be pinned. Any thread."""

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._counting = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Whether there was room for so many."""
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
"""Not devices beside the host."""


@functools.cache
def can_pin() -> bool:
    """Of the one kind of accelerator that a process has."""
    try:
        return torch.empty(1).pin_memory().is_pinned()
    except (RuntimeError, NotImplementedError):  # of torch, by the backend that has no such memory
        return False


def describe_devices(tensors: Iterable[torch.Tensor]) -> str:
    """For the line that is printed at the start: where parameters are, and what is lacking there.

    Empty if all are in the host's memory.
    """
    devices = sorted({str(t.device) for t in tensors if t.device.type not in HOSTS})
    return "".join(f"; parameters on {_described(torch.device(name))}" for name in devices)


def _described(device: torch.device) -> str:
    lacks = TorchAccelerator(device).lacks
    if "streams" in lacks:
        return f"{device} (no streams there: copies hold up training)"
    if lacks:
        return f"{device} (no pinned memory there: a thread beside training copies)"
    return f"{device}, copied through pinned host memory beside the computation"
