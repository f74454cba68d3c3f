"""A worker's casts to and from the type that gradients and new values travel in.

They are placed on the side that halves the bytes (Kim et al., Parallax: Automatic Data-Parallel
Training of Deep Neural Networks, sections 3.2 and 5.3.2): a gradient is cast before it leaves, new
values by the server, once for all workers. A worker casts slice by slice in the threads that send
and receive, while the bytes are in the cache: no pass through the model waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from foreprop.core.manifest import Manifest
from foreprop.core.slicing import Slice
from foreprop.path.memory import bytes_of
from foreprop.path.tensors import DTYPES

_AT_ONCE_ELEMS = 32_768
"""torch divides a longer copy among threads, of which every thread here would get a team."""


class WireCasts:
    """Between float32 parameters and the wire.

    A thread sends one slice at a time, and receives one. Which server a slice belongs to may change
    meanwhile (`core.takeover`), so memory is the threads'.
    """

    def __init__(self, manifest: Manifest, slices: Sequence[Slice]) -> None:
        wire_dtype = manifest.knobs.wire_dtype
        self._dtype = DTYPES[wire_dtype] if wire_dtype is not None else torch.float32
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
        """Of the slice on the wire."""
        return self._slices[slice_].elems * self._dtype.itemsize

    def narrow(self, slice_: int, gradient: memoryview) -> memoryview:
        """The gradient's bytes in the wire's type; they last until this thread's next slice."""
        target = self._room(self._outgoing, slice_)
        _cast(target, torch.frombuffer(gradient, dtype=torch.float32))
        return bytes_of(target)

    def destination(self, slice_: int) -> memoryview:
        """Where the slice's next reply goes, until `widen`."""
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
    """To the nearest, ties to even; beyond the range of float16 to infinity, as torch does."""
    for start in range(0, len(source), _AT_ONCE_ELEMS):
        part = slice(start, start + _AT_ONCE_ELEMS)
        target[part].copy_(source[part])
