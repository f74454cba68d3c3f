"""A relay's tensors: its workers' gradients of each slice, their sum, and the server's answer.

The sum is made in rank order, in float32 for gradients in half precision, and pushed on in the type
in which the gradients came.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreprop.core.manifest import Manifest
from foreprop.core.slicing import Slice
from foreprop.errors import RemoteProtocolError
from foreprop.path.slicestore import Extent, GradientBuffer
from foreprop.path.tensors import DTYPES, add_up, sum_dtype


class _Relayed:
    __slots__ = (
        "answers",
        "dtype",
        "elems",
        "gradients",
        "offered",
        "total",
        "values",
        "wire_dtype",
    )

    def __init__(self, elems: int, dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
        self.elems = elems
        self.dtype = dtype
        self.wire_dtype = wire_dtype
        self.gradients: dict[int, GradientBuffer] = {}  # by worker
        self.total: GradientBuffer | None = None  # until it is pushed on
        self.offered: dict[int, GradientBuffer] = {}  # rank 0's values by step, until passed on
        self.answers: memoryview | None = None  # room for what the server sends
        self.values = memoryview(b"")  # what the workers' replies carry


class RelayStore:
    """Methods are called with the relay's lock held, but for `add_up`: one thread at a time."""

    def __init__(self, manifest: Manifest, slices: Sequence[Slice], server: int) -> None:
        dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        self._slices = {
            piece.number: _Relayed(
                piece.elems, dtypes[piece.parameter], wire_dtypes[piece.parameter]
            )
            for piece in slices
            if piece.server == server
        }
        self._pool: dict[tuple[int, torch.dtype], list[GradientBuffer]] = {}

    # From the workers.
    def size_bytes(self, slice_: int, *, value: bool = False) -> int:
        """Of a gradient, in the wire's type, or of a value, which comes in full."""
        relayed = self._slices[slice_]
        return relayed.elems * (relayed.dtype if value else relayed.wire_dtype).itemsize

    def take_buffer(self, slice_: int, *, value: bool = False) -> GradientBuffer:
        """For a gradient or a value; see `size_bytes`."""
        relayed = self._slices[slice_]
        dtype = relayed.dtype if value else relayed.wire_dtype
        free = self._pool.get((relayed.elems, dtype))
        return free.pop() if free else GradientBuffer(_whole(relayed.elems), dtype)

    def put_gradient(self, slice_: int, worker: int, buffer: GradientBuffer) -> None:
        self._slices[slice_].gradients[worker] = buffer

    def put_value(self, slice_: int, buffer: GradientBuffer, *, step: int = 0) -> None:
        """Rank 0's values, to be passed on; those of step 0 may still be here."""
        self._slices[slice_].offered[step] = buffer

    def install_value(self, slice_: int) -> None:
        """The values that rank 0 starts with are also what the others on this node get."""
        relayed = self._slices[slice_]
        relayed.values = relayed.offered[0].view

    def add_up(self, slice_: int, workers: Sequence[int]) -> None:
        """The gradients of ``workers``, in that order, in the memory of the first one's."""
        relayed = self._slices[slice_]
        if not workers:
            return
        buffers = [relayed.gradients[worker] for worker in workers]
        first = buffers[0].tensor
        dtype = sum_dtype(first.dtype, workers=len(workers))
        total = add_up([buffer.tensor for buffer in buffers], dtype)
        if total is not first:
            first.copy_(total)
        relayed.total = buffers[0]

    # To the server.
    def keep_sum_only(self, slice_: int) -> None:
        """After `add_up`: the gradients that it has read are not needed any more."""
        relayed = self._slices[slice_]
        for buffer in relayed.gradients.values():
            if buffer is not relayed.total:
                self.give_back(buffer)
        relayed.gradients.clear()

    def take_sum(self, slice_: int) -> GradientBuffer | None:
        """To be pushed on, and then given back."""
        relayed = self._slices[slice_]
        total, relayed.total = relayed.total, None
        return total

    def give_back(self, buffer: GradientBuffer) -> None:
        key = (buffer.extent.elems, buffer.tensor.dtype)
        self._pool.setdefault(key, []).append(buffer)

    def take_value(self, slice_: int, step: int) -> memoryview:
        """Rank 0's values, which are passed on now."""
        return self._slices[slice_].offered.pop(step).view

    # From the server, and back to the workers.
    def room(self, slice_: int, size_bytes: int) -> memoryview:
        """For an answer: in full, as before the first update, or in the wire's type.

        Its last answer has been read by every worker: each has pushed the next step since. Raises
        `RemoteProtocolError` for any other size.
        """
        relayed = self._slices[slice_]
        full_bytes = self.size_bytes(slice_, value=True)
        if size_bytes not in (full_bytes, self.size_bytes(slice_)):
            raise RemoteProtocolError(
                f"a reply for slice {slice_} carries {size_bytes} bytes, not {full_bytes}"
            )
        if relayed.answers is None:
            relayed.answers = GradientBuffer(_whole(relayed.elems), relayed.dtype).view
        return relayed.answers[:size_bytes]

    def land(self, slice_: int, answer: memoryview) -> None:
        """An answer is in its `room`: this is what the workers' replies carry now."""
        if len(answer):
            self._slices[slice_].values = answer

    def values(self, slice_: int) -> memoryview:
        return self._slices[slice_].values


def _whole(elems: int) -> Extent:
    """Sums are the same without padding: each element's is rounded by itself."""
    return Extent(0, elems, elems)
