"""What servers and relays do with gradients: room for them, sums, norms, averages.

Gradients are added up in one order, that of the ranks, so no bit depends on who comes first.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from foreprop.config import LOGGER
from foreprop.core.manifest import Aggregation, Reduction
from foreprop.core.norm import BIN_BITS, BINS, ENCODED_BYTES, ZERO, SquareSum, decode_square_sum
from foreprop.core.slicing import Slice
from foreprop.engine import native
from foreprop.engine.memory import bytes_of, drop_pages, dtype_name

_VECTOR_ELEMS = 64
"""A multiple of what torch's kernels take at a time: two AVX-512 registers of half precision."""


class Extent(NamedTuple):
    """Where a slice lies in its tensor, which begins and ends with vectors of the parameter."""

    lead_elems: int
    elems: int
    total_elems: int

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.total_elems, dtype=dtype)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice's own elements of a tensor of ``total_elems``."""
        return tensor[self.lead_elems : self.lead_elems + self.elems]

    def padded(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor of ``total_elems`` with these elements of the slice, and zeros."""
        tensor = self.zeros(part.dtype)
        self.part(tensor)[:] = part
        return tensor


def extent_of(piece: Slice, parameter_elems: int) -> Extent:
    first = piece.start_elems // _VECTOR_ELEMS * _VECTOR_ELEMS
    last = min(-(-piece.stop_elems // _VECTOR_ELEMS) * _VECTOR_ELEMS, parameter_elems)
    return Extent(piece.start_elems - first, piece.elems, last - first)


class GradientBuffer:
    """Memory for one pushed gradient, out of `Buffers`."""

    __slots__ = ("extent", "is_empty", "memory", "readers", "tensor", "view")

    def __init__(self, extent: Extent, memory: torch.Tensor) -> None:
        """``memory`` has as many elements or more, with zeros around the slice's own."""
        self.extent = extent
        self.memory = memory
        self.is_empty = False
        """Whether the system has its pages, until somebody writes to it."""
        self.tensor = memory[: extent.total_elems]
        self.view = bytes_of(extent.part(self.tensor))
        self.readers = 0
        """Workers that have still to be sent it, if nobody needs it afterwards."""


_LEAST_SPARE_BYTES = 16 << 20
_SPARE_SHARE = 16


class Buffers:
    """The gradient buffers of one store. Any thread.

    There are as many as have been in use at a time: if none of a slice's extent is free, another
    one of about its size is taken. A worker may run ahead of the others by a whole model, but then
    the averages that it waits for take no memory there (`params.averaged`). So free buffers take
    none here, either, but for a part of what the store has slices for.
    """

    def __init__(self, slices_bytes: int) -> None:
        self._spare_bytes = max(_LEAST_SPARE_BYTES, slices_bytes // _SPARE_SHARE)
        self._free_bytes = 0  # that are not empty
        self._pools: dict[tuple[Extent, torch.dtype], list[GradientBuffer]] = {}
        self._same_size: defaultdict[tuple[int, torch.dtype], list[list[GradientBuffer]]]
        self._same_size = defaultdict(list)
        """The pools whose buffers have as much memory."""
        self._lock = threading.Lock()

    def take(self, extent: Extent, dtype: torch.dtype) -> GradientBuffer:
        with self._lock:
            if not (pool := self._pools.get((extent, dtype))):
                elems = _buffer_elems(extent.total_elems)
                same_size = self._same_size[elems, dtype]
                if pool is None:
                    same_size.append(self._pools.setdefault((extent, dtype), []))
                pool = next(filter(None, same_size), None)  # of buffers with as much memory
                if pool is None:
                    return GradientBuffer(extent, torch.zeros(elems, dtype=dtype))
            buffer = pool.pop()
            if buffer.is_empty:
                buffer.is_empty = False
            else:
                self._free_bytes -= buffer.memory.nbytes
        if buffer.extent == extent:
            return buffer
        buffer.memory[: extent.lead_elems].zero_()
        buffer.memory[extent.lead_elems + extent.elems : extent.total_elems].zero_()
        return GradientBuffer(extent, buffer.memory)

    def give(self, buffer: GradientBuffer) -> None:
        memory = buffer.memory
        with self._lock:
            pool = self._pools[buffer.extent, memory.dtype]
            if self._free_bytes + memory.nbytes > self._spare_bytes and drop_pages(memory):
                buffer.is_empty = True
                pool.insert(0, buffer)  # taken last
            else:
                self._free_bytes += memory.nbytes
                pool.append(buffer)


def _buffer_elems(elems: int) -> int:
    """The elements of a buffer: a few more, so that slices of about one size share buffers."""
    step = max(_VECTOR_ELEMS, 1 << max(0, elems.bit_length() - 6))
    return -(-elems // step) * step


_AT_ONCE_ELEMS = 65_536
"""How many are squared at once: they fit the cache, and a bin's sum stays exact (2**53)."""
_LEAST_TOP = -36
"""The least bin, so that 2**(-_LEAST_TOP * BIN_BITS) is finite; lower squares are nothing."""


_HALVES = (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype, *, workers: int) -> torch.dtype:
    """The type that several workers' gradients are summed in: half would lose small ones."""
    return torch.float32 if dtype in _HALVES and workers > 1 else dtype


def add_up(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum in the given order, in the first one's memory unless ``dtype`` is another."""
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total += gradient
    return total


def finish_sum(
    total: torch.Tensor, reduction: Reduction, *, workers: int, scale: float, out: torch.Tensor
) -> None:
    """Make ``out`` the mean of ranks' summed gradients, without the loss's scale."""
    if workers > 1 and reduction == "mean":
        torch.div(total, workers, out=out)
    elif out is not total:
        out.copy_(total)
    if scale != 1.0:
        out *= 1.0 / scale


def start_average(parameter: torch.Tensor) -> torch.Tensor:
    """A moving average that begins with the parameter's value; in float32 at least."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(wide, copy=True)


def move_average(average: torch.Tensor, parameter: torch.Tensor, decay: float) -> None:
    """``average = decay * average + (1 - decay) * parameter``."""
    average.lerp_(parameter.detach().to(average.dtype), 1 - decay)


def square_sum(gradient: torch.Tensor) -> SquareSum:
    """The sum of all elements' squares; the same for any way of cutting the gradient.

    The native library makes it where there is one, with the bits of `binned_square_sum`.
    """
    number = native.DTYPES.get(dtype_name(gradient.dtype))
    library = native.maybe_library()
    if library is None or number is None or not gradient.is_cpu:
        return binned_square_sum(gradient)
    whole, encoded = gradient.contiguous(), (ctypes.c_uint8 * ENCODED_BYTES)()
    library.fp_square_sum(number, whole.data_ptr(), whole.numel(), encoded)
    return decode_square_sum(bytes(encoded))


def binned_square_sum(gradient: torch.Tensor) -> SquareSum:
    """The specification of `square_sum`, bin by bin (`core.norm`)."""
    flat, total = gradient.reshape(-1), ZERO
    for start in range(0, flat.numel(), _AT_ONCE_ELEMS):
        total = total.plus(_square_sum_of(flat[start : start + _AT_ONCE_ELEMS]))
    return total


def _square_sum_of(part: torch.Tensor) -> SquareSum:
    rest = part.to(torch.float64, copy=True).square_()  # exact, unless the gradient is float64
    largest = float(rest.max())
    if not math.isfinite(largest):
        return SquareSum(beyond=float(rest[~rest.isfinite()].sum()))
    if not largest:
        return ZERO
    top = max((math.frexp(largest)[1] - 1) // BIN_BITS, _LEAST_TOP)
    rest *= math.ldexp(1.0, -top * BIN_BITS)
    whole = torch.empty_like(rest)
    bins = []
    for _ in range(BINS):
        torch.floor(rest, out=whole)
        bins.append(int(whole.sum()))
        rest.sub_(whole).mul_(2.0**BIN_BITS)
    return SquareSum(top, (bins[0], bins[1], bins[2]))


def clip(gradient: torch.Tensor, aggregation: Aggregation, coefficient: float = 1.0) -> None:
    """Clip by norm, whose ``coefficient`` it is, or by element, as ``torch.nn.utils`` does."""
    if coefficient != 1.0:
        gradient *= coefficient
    limit = aggregation.clip_grad_value
    if limit is not None:
        gradient.clamp_(-limit, limit)


def count_rows(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return 0
    if gradient.layout == torch.sparse_coo:
        return len(gradient.coalesce().values())
    return int(gradient.reshape(len(gradient), -1).any(1).sum())


_TIMES = 3
"""How often one array's gradients must have been the same, and no other's different."""


class SameBatch:
    """Finds out whether all ranks train on the same batch, as if `foreprop.shard` was forgotten.

    It compares what several have pushed until two differ: mostly in the first array of step 1.
    """

    __slots__ = ("_same", "_where", "_whose", "watching")

    def __init__(self, where: str, whose: str = "ranks") -> None:
        self.watching = True
        """Whether `look` is still to be told."""
        self._where, self._whose = where, whose
        self._same: dict[Hashable, int] = {}

    def look(self, which: Hashable, gradients: Sequence[torch.Tensor], *, many: int) -> None:
        """Compare an array's gradients of all ``many`` ranks or nodes, once a step. Warns once."""
        first, *others = gradients
        if not others:
            return
        low, high = first.aminmax()
        # nothing is told by one number in all elements: zeros, or a sum of outputs' bias
        if not (torch.isfinite(low) & torch.isfinite(high) & (low != high)):
            return
        if not all(torch.equal(first, other) for other in others):
            self.watching = False
            return
        self._same[which] = times = self._same.get(which, 0) + 1
        self.note(times, many=many)

    def note(self, times: int, *, many: int) -> None:
        """Count that all have pushed the same of an array so often, and no other's differed."""
        if times >= _TIMES and self.watching:
            self.watching = False
            LOGGER.warning(
                "%s: the gradients of %d %s were the same in %d steps, as if they trained on the"
                " same batches: foreprop.shard(loader) gives each rank its share",
                self._where,
                many,
                self._whose,
                _TIMES,
            )
