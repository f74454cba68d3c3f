"""Where a parameter's bytes are: its own memory, or host memory that stands for it.

A contiguous CPU parameter is sent from and received into directly. Another layout, or a GPU's
parameter, is staged (`path.gpumemory`). `SliceMemory` finds the bytes of each slice in it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foreprop.config import Config
from foreprop.core.manifest import ITEMSIZE_BYTES, Manifest
from foreprop.core.sendqueue import runs_ahead
from foreprop.core.slicing import Slice
from foreprop.errors import InternalError

if TYPE_CHECKING:
    from foreprop.core.pushwindow import PushWindow
    from foreprop.path.gpumemory import Stager

Ready = Callable[[Any], None]
"""Takes a gradient's bytes: a memoryview, or of a parameter that stays on its GPU a tensor."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's bytes."""
    if not tensor.is_contiguous():
        raise InternalError("a tensor's bytes can only be viewed if it is contiguous")
    # one of no or one element is contiguous with any stride, but only bytes side by side are bytes
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


_LEAST_DROPPED_BYTES = 1 << 17
"""Less is not worth the system's while."""


def drop_pages(tensor: torch.Tensor) -> bool:
    """Give a contiguous CPU tensor's pages to the system; whether it has taken them.

    What is in it is lost: zeros, or what was there. Written to, it gets new pages.
    """
    if sys.platform != "linux" or tensor.nbytes < _LEAST_DROPPED_BYTES:
        return False
    start = tensor.data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size_bytes = (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    about = (ctypes.c_void_p(first), ctypes.c_size_t(size_bytes), mmap.MADV_DONTNEED)
    return bool(_libc().madvise(*about) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Memory(Protocol):
    """The bytes of one parameter, and of its gradient on the way out."""

    @property
    def values(self) -> memoryview: ...

    is_staged: bool
    """Whether bytes pass through memory of their own: else nothing has to be awaited or landed."""
    receives_values: bool
    """Whether replies, and nothing else, make what the parameter shows next."""

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        """Call ``ready`` with the gradient's bytes, in the order of the flattened parameter.

        Now, or from another thread once they are in host memory. ``ready`` holds the gradient.
        """

    def pass_by(self, ready: Callable[[], None]) -> None:
        """There is no gradient: call ``ready`` when nothing uses the last values any more."""

    def await_staged(self) -> None:
        """Block until the last `stage_gradient` or `pass_by` has called ``ready``."""

    def before_sending_values(self) -> None:
        """Make ``values`` show the parameter as it is now."""

    def land(self) -> None:
        """All replies are in ``values``: make the parameter show them. Training thread."""


class DirectMemory:
    """A contiguous CPU parameter: no copies at all."""

    is_staged = False
    receives_values = True

    def __init__(self, parameter: torch.Tensor) -> None:
        self.values = bytes_of(parameter)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        ready(bytes_of(gradient.contiguous()))

    def pass_by(self, ready: Callable[[], None]) -> None:
        ready()

    def await_staged(self) -> None:
        pass

    def before_sending_values(self) -> None:
        pass

    def land(self) -> None:
        pass


class MemoryFactory:
    """Chooses each parameter's memory; owns the threads that some of it needs."""

    def __init__(self, config: Config, *, stays: bool = False) -> None:
        self._pinned_bytes, self._stays = config.pinned_bytes, stays
        """Whether on the GPU, for collectives between GPUs."""
        self._stagers: dict[torch.device, Stager] = {}

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            return DirectMemory(parameter)
        from foreprop.path.gpumemory import staged_memory_of

        pinned_bytes, stays = self._pinned_bytes, self._stays
        return staged_memory_of(parameter, self._stagers, stays=stays, pinned_bytes=pinned_bytes)

    def stop(self) -> None:
        for stager in self._stagers.values():
            stager.stop()
        self._stagers.clear()


class HeldGradient:
    """A gradient while it is being sent: kept alive until its last part has been taken.

    Given once its bytes can be sent; taken in parts by the sending threads, one per server. If it
    ``stays`` it may be taken again, until the next one is held: a server may be lost that had it.
    """

    def __init__(self, name: str, *, stays: bool = False) -> None:
        self._name = name
        self._stays = stays
        self._gradient: torch.Tensor | None = None
        self._bytes: Any = None
        self._unsent_bytes = 0
        self._taking = threading.Lock()

    def hold(self, gradient: torch.Tensor, its_bytes: Any) -> None:
        """Keep it until all of its bytes have been taken."""
        self._unsent_bytes = gradient.numel() * gradient.element_size()
        self._gradient = gradient if self._unsent_bytes else None
        self._bytes = its_bytes

    def take(self, start_bytes: int, stop_bytes: int) -> Any:
        """A part; each is taken once, if it does not stay. Any thread."""
        whole = self._bytes
        if whole is None or self._gradient is None:
            raise InternalError(f"no gradient of {self._name} is held")
        if self._stays:
            return whole[start_bytes:stop_bytes]
        with self._taking:
            self._unsent_bytes -= stop_bytes - start_bytes
            if self._unsent_bytes <= 0:
                self._gradient = self._bytes = None
        return whole[start_bytes:stop_bytes]


class ParameterMemory(Protocol):
    """Where the bytes of one parameter are; the training side owns it."""

    @property
    def values(self) -> memoryview:
        """The parameter itself, or the staging memory that stands for it."""

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Part of the gradient, to be sent now. Each part is taken once; the last one ends the
        parameter's hold on the gradient. Sending thread.
        """

    def sent_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview | None:
        """The same part as it is now, if it may have changed since, and is not answered. Receiving
        thread.
        """

    @property
    def landed(self) -> memoryview:
        """The last average, where the workers update, as it stays until the next one lands."""

    def land_average(self, gradient: torch.Tensor) -> None:
        """Collectives have aggregated it, and the workers update: flat. Any thread."""


class Casts(Protocol):
    """To and from the type in which some slices travel (`numerics.wirecasts`)."""

    def __contains__(self, slice_: int) -> bool: ...
    def size_bytes(self, slice_: int) -> int: ...
    def narrow(self, slice_: int, gradient: memoryview) -> memoryview: ...
    def destination(self, slice_: int) -> memoryview: ...
    def widen(self, slice_: int, values: memoryview) -> None: ...


class SliceMemory:
    """The slices of these parameters, as bytes; ``memory`` may be filled later."""

    def __init__(
        self, manifest: Manifest, slices: Sequence[Slice], memory: Sequence[ParameterMemory]
    ) -> None:
        self.casts: Casts | None = None
        itemsizes = [ITEMSIZE_BYTES[info.dtype] for info in manifest.parameters]
        self._extents = [
            (
                piece.parameter,
                piece.start_elems * itemsizes[piece.parameter],
                piece.stop_elems * itemsizes[piece.parameter],
            )
            for piece in slices
        ]
        self._memory = memory

    def use_casts(self, casts: Casts) -> None:
        """Some slices travel in another type."""
        self.casts = casts

    def take_gradient(self, slice_: int) -> memoryview:
        """As it travels, once. Sending thread."""
        parameter, start, stop = self._extents[slice_]
        gradient = self._memory[parameter].take_gradient(start, stop)
        if self.casts is not None and slice_ in self.casts:
            return self.casts.narrow(slice_, gradient)
        return gradient

    def sent_gradient(self, slice_: int) -> memoryview | None:
        """As it is now, of a push under way; None if it cannot have changed. Receiving thread."""
        if self.casts is not None and slice_ in self.casts:
            return None
        parameter, start, stop = self._extents[slice_]
        return self._memory[parameter].sent_gradient(start, stop)

    def values(self, slice_: int) -> memoryview:
        parameter, start, stop = self._extents[slice_]
        return self._memory[parameter].values[start:stop]

    def landed(self, slice_: int) -> memoryview:
        """The slice's last average, where the workers update."""
        parameter, start, stop = self._extents[slice_]
        return self._memory[parameter].landed[start:stop]

    def room(self, slice_: int, size_bytes: int) -> memoryview:
        """Where a reply goes: mostly into the parameter itself."""
        parameter, start, stop = self._extents[slice_]
        values = self._memory[parameter].values[start:stop]
        if self.casts is not None and slice_ in self.casts and size_bytes != len(values):
            return self.casts.destination(slice_)
        return values  # also of a slice that is cast, before its first update

    def land(self, slice_: int, size_bytes: int) -> None:
        """A reply is in its `room`: if it came cast, cast it back. Only with ``casts``."""
        casts = self.casts
        if casts is not None and slice_ in casts and size_bytes == casts.size_bytes(slice_):
            casts.widen(slice_, self.values(slice_))


def push_window(
    manifest: Manifest, slices: Sequence[Slice], config: Config, *, servers: int
) -> PushWindow | None:
    """How far a worker may run ahead of the others, if it is held back at all."""
    knobs = manifest.knobs
    if knobs.lanes == "one" or knobs.staleness or runs_ahead(knobs.order, servers):
        return None
    from foreprop.core.pushwindow import PushWindow, may_hold_back, pushed_bytes

    if not may_hold_back(knobs.order, knobs.reply, needs_norm=manifest.needs_norm):
        return None
    sizes_bytes = pushed_bytes(manifest, slices)
    return PushWindow(sizes_bytes, config.push_window_bytes, servers=servers)
