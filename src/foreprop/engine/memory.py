"""Where a parameter's bytes are: its own memory, or host memory that stands for it.

A contiguous CPU parameter is sent from and received into directly. Another layout, or a GPU's
parameter, is staged (`engine.gpumemory`). `SliceMemory` finds the bytes of each slice in it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from foreprop.core.manifest import ITEMSIZE_BYTES, Manifest
from foreprop.core.slicing import Slice
from foreprop.engine.asyncdevice import TorchAccelerator
from foreprop.engine.connection import EMPTY
from foreprop.errors import InternalError

Ready = Callable[[Any], None]
"""Takes a gradient's bytes: a memoryview, or a tensor of one that stays on its GPU."""


class Copying(NamedTuple):
    """A copy, over once the int64 at ``word`` has come to ``number``; ``check`` raises failures."""

    word: int
    number: int
    check: Callable[[], object]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """A type's name as a manifest has it."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's bytes."""
    if not (tensor.is_contiguous() and tensor.is_cpu) or tensor.is_neg():
        raise InternalError("bytes can only be viewed of a contiguous tensor of the host, as it is")
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor.detach()  # a third of what torch's and numpy's views take
    return memoryview(array).cast("B")


_LEAST_DROPPED_BYTES = 1 << 17
"""Giving back less is not worth the system's while."""


def drop_pages(tensor: torch.Tensor) -> bool:
    """Give a contiguous CPU tensor's pages to the system; returns whether it took them.

    The tensor then has zeros, or what was there. Written to, it gets new pages.
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


class Memory:
    """The bytes of one parameter, and of its gradient on the way out."""

    values: memoryview = EMPTY
    is_staged = False
    """Whether bytes pass through memory of their own: else nothing has to be awaited or landed."""
    receives_values = True
    """Whether replies, and nothing else, make what the parameter shows next."""
    accelerator: TorchAccelerator | None = None
    """The device from which gradients are copied beside training, if they are."""
    counts = False
    copying: Copying | None = None
    """With ``counts``, if not None: ``ready`` has been called, and this is to be looked for."""

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        """Call ``ready`` with the gradient's bytes, in the order of the flattened parameter.

        That is now, or from another thread once they are in host memory. ``ready`` holds the
        gradient.
        """
        raise NotImplementedError

    def pass_by(self, ready: Callable[[], None]) -> None:
        """Call ``ready`` without a gradient, when nothing uses the last values any more."""
        ready()

    def await_staged(self) -> None:
        """Block until the last `stage_gradient` or `pass_by` has called ``ready``."""

    def before_sending_values(self) -> None:
        """Make ``values`` show the parameter as it is now."""

    def land(self) -> None:
        """Make the parameter show ``values``, where all replies are. Training thread."""


class DirectMemory(Memory):
    """A contiguous CPU parameter: no copies at all."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.values = bytes_of(parameter)

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        ready(bytes_of(gradient.contiguous()))


class HeldGradient:
    """A gradient that is being sent, kept alive until its last part has been taken.

    It is given once its bytes can be sent, and taken in parts by the sending threads, one per
    server. If it ``stays`` it may be taken again, until the next one is held: a server may be lost
    that had it.
    """

    def __init__(self, name: str, *, stays: bool = False) -> None:
        self._name = name
        self._stays = stays
        self._gradient: torch.Tensor | None = None
        self._bytes: Any = None
        self._unsent_bytes = 0
        self._taking = threading.Lock()

    def hold(self, gradient: torch.Tensor, its_bytes: Any) -> None:
        self._unsent_bytes = gradient.numel() * gradient.element_size()
        self._gradient = gradient if self._unsent_bytes else None
        self._bytes = its_bytes

    @property
    def whole(self) -> Any:
        """The whole gradient, which stays until the next `hold` or `release`."""
        if self._bytes is None:
            raise InternalError(f"no gradient of {self._name} is held")
        return self._bytes

    def release(self) -> None:
        self._gradient = self._bytes = None

    def take(self, start_bytes: int, stop_bytes: int) -> Any:
        """Take a part; each once, unless the gradient stays. Any thread."""
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


class ParameterBytes:
    """One parameter's bytes, as the engine reads and writes them; as here, a table's."""

    values: memoryview = EMPTY
    """The parameter itself, or the staging memory that stands for it."""
    copying: Copying | None = None
    """For what the engine has to look before it sends the gradient, if for anything."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def landed(self) -> memoryview:
        """The last average, where the workers update; it stays until the next one lands."""
        raise InternalError(f"the workers do not update {self._name}")

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Take a part of the gradient, to be sent now. Sending thread.

        Each part is taken once; the last one ends the parameter's hold on the gradient.
        """
        raise InternalError(f"{self._name} is not sent or updated as a whole")

    # Where the plane reads and writes (`engine.plane`), from a push until its answer is here.
    def lent_gradient(self) -> memoryview:
        raise InternalError(f"the workers do not update {self._name}")

    def landing_bytes(self) -> memoryview:
        """The memory into which the average goes."""
        raise InternalError(f"the workers do not update {self._name}")

    def answered(self) -> None:
        """Told that the average has come, with values."""

    def sent_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview | None:
        """The same part as it is now; None unless it may have changed since. Receiving thread.

        What has been answered has not.
        """
        return None


_AT_ONCE_ELEMS = 32_768
"""Longer copies torch divides among threads, of which every thread here would get a team."""


class WireCasts:
    """Casts between float32 parameters and the wire.

    They are placed on the side that halves the bytes (Kim et al., Parallax: Automatic Data-Parallel
    Training of Deep Neural Networks, sections 3.2 and 5.3.2): a gradient is cast before it leaves,
    new values by the server, once for all workers. A worker casts slice by slice in the threads
    that send and receive, while the bytes are in the cache: no pass through the model waits for it.

    A thread sends one slice at a time, and receives one. Which server a slice belongs to may change
    meanwhile (`core.takeover`), so memory is the threads'.
    """

    def __init__(self, manifest: Manifest, slices: Sequence[Slice]) -> None:
        self._dtype: torch.dtype = getattr(torch, manifest.knobs.wire_dtype or "float32")
        cast = [
            info.dtype != on_wire
            for info, on_wire in zip(manifest.parameters, manifest.wire_dtypes(), strict=True)
        ]
        self._slices = {piece.number: piece for piece in slices if cast[piece.parameter]}
        self._largest_elems = max((piece.elems for piece in self._slices.values()), default=0)
        self._outgoing, self._incoming = threading.local(), threading.local()

    def __contains__(self, slice_: int) -> bool:
        """Whether this slice's gradients and new values are cast at all."""
        return slice_ in self._slices

    def size_bytes(self, slice_: int) -> int:
        return self._slices[slice_].elems * self._dtype.itemsize

    def narrow(self, slice_: int, gradient: memoryview) -> memoryview:
        """The gradient's bytes in the wire's type; they last until this thread's next slice."""
        target = self._room(self._outgoing, slice_)
        _cast(target, torch.frombuffer(gradient, dtype=torch.float32))
        return bytes_of(target)

    def destination(self, slice_: int) -> memoryview:
        return bytes_of(self._room(self._incoming, slice_))

    def widen(self, slice_: int, values: memoryview) -> None:
        """Put the reply that has come to `destination` into the parameter's bytes."""
        _cast(torch.frombuffer(values, dtype=torch.float32), self._room(self._incoming, slice_))

    def _room(self, rooms: threading.local, slice_: int) -> torch.Tensor:
        whole: torch.Tensor | None = getattr(rooms, "whole", None)
        if whole is None:
            whole = rooms.whole = torch.empty(self._largest_elems, dtype=self._dtype)
        return whole[: self._slices[slice_].elems]


def _cast(target: torch.Tensor, source: torch.Tensor) -> None:
    for start in range(0, len(source), _AT_ONCE_ELEMS):
        part = slice(start, start + _AT_ONCE_ELEMS)
        target[part].copy_(source[part])


class SliceMemory:
    """The slices of these parameters, as bytes; ``memory`` may be filled later."""

    def __init__(
        self, manifest: Manifest, slices: Sequence[Slice], memory: Sequence[ParameterBytes]
    ) -> None:
        dtypes = [info.dtype for info in manifest.parameters]
        is_cast = manifest.wire_dtypes() != dtypes
        self.casts = WireCasts(manifest, slices) if is_cast else None
        """The casts of slices that travel in another type; None if there are none."""
        itemsizes = [ITEMSIZE_BYTES[dtype] for dtype in dtypes]
        self._extents = [
            (
                piece.parameter,
                piece.start_elems * itemsizes[piece.parameter],
                piece.stop_elems * itemsizes[piece.parameter],
            )
            for piece in slices
        ]
        self._memory = memory

    def take_gradient(self, slice_: int) -> memoryview:
        """Take a slice's gradient as it travels, once. Sending thread."""
        parameter, start, stop = self._extents[slice_]
        gradient = self._memory[parameter].take_gradient(start, stop)
        if self.casts is not None and slice_ in self.casts:
            return self.casts.narrow(slice_, gradient)
        return gradient

    def sent_gradient(self, slice_: int) -> memoryview | None:
        """A push's gradient as it is now; None if it cannot have changed. Receiving thread."""
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
        """Memory for a reply: mostly the parameter's own."""
        parameter, start, stop = self._extents[slice_]
        values = self._memory[parameter].values[start:stop]
        if self.casts is not None and slice_ in self.casts and size_bytes != len(values):
            return self.casts.destination(slice_)
        return values  # also of a slice that is cast, before its first update

    def land(self, slice_: int, size_bytes: int) -> None:
        """Cast back a reply that has come cast into its `room`. Only with ``casts``."""
        casts = self.casts
        if casts is not None and slice_ in casts and size_bytes == casts.size_bytes(slice_):
            casts.widen(slice_, self.values(slice_))
