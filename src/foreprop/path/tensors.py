"""What is done with tensors on servers and relays: bytes, sums, norms, averages.

The state of an optimizer or an average travels without pickle. Gradients are added up in one
order, that of the ranks, so no bit depends on who comes first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec
import torch

from foreprop.core.manifest import Aggregation, Reduction
from foreprop.core.norm import BIN_BITS, BINS, ZERO, SquareSum
from foreprop.core.slicing import Slice
from foreprop.errors import InternalError, RemoteProtocolError

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
AVERAGE = "ema"
"""The name of the one entry of a slice's moving average."""
GRADIENT = "gradient"
"""The name of the one entry of a slice's aggregated gradient."""
MASTER = "master"
"""The name of the one entry of a slice's values in full."""
_STATE_ENTRIES_LIMIT = 16
_STATE_HEAD_LIMIT_BYTES = 65_536
_LENGTH = struct.Struct("!I")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's bytes."""
    if not tensor.is_contiguous():
        raise InternalError("a tensor's bytes can only be viewed if it is contiguous")
    # one of no or one element is contiguous with any stride, but only bytes side by side are bytes
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def is_array(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() > 0


_VECTOR_ELEMS = 64
"""A multiple of what torch's kernels take at a time: two AVX-512 registers of half precision."""


class Extent(NamedTuple):
    """Where a slice lies in its tensor, which reaches from vector to vector of the parameter."""

    lead_elems: int
    elems: int
    total_elems: int

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.total_elems, dtype=dtype)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice's own elements of a tensor of ``total_elems``."""
        return tensor[self.lead_elems : self.lead_elems + self.elems]


def extent_of(piece: Slice, parameter_elems: int) -> Extent:
    first = piece.start_elems // _VECTOR_ELEMS * _VECTOR_ELEMS
    last = min(-(-piece.stop_elems // _VECTOR_ELEMS) * _VECTOR_ELEMS, parameter_elems)
    return Extent(piece.start_elems - first, piece.elems, last - first)


class GradientBuffer:
    """Room for one pushed gradient; goes back to its pool after the update."""

    __slots__ = ("extent", "tensor", "view")

    def __init__(self, extent: Extent, dtype: torch.dtype) -> None:
        self.extent = extent
        self.tensor = extent.zeros(dtype)
        self.view = bytes_of(extent.part(self.tensor))


class _StateEntry(msgspec.Struct, frozen=True):
    """One entry of an optimizer's state: a tensor of ``elems`` elements, or a plain number."""

    key: str
    dtype: str = ""
    elems: int = 0
    number: int | float | bool | None = None
    scalar: bool = False


_ENTRIES = msgspec.json.Decoder(tuple[_StateEntry, ...])
_STATE_DTYPES = {**DTYPES, "int64": torch.int64, "int32": torch.int32, "bool": torch.bool}


def state_limit_bytes(elems: int) -> int:
    """More than any element-wise optimizer's state of a slice can need."""
    return _STATE_ENTRIES_LIMIT * 8 * max(elems, 1) + _STATE_HEAD_LIMIT_BYTES


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Flat tensors and plain numbers by name, without pickle."""
    entries, payloads = [], []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            flat = value.detach().reshape(-1).contiguous().cpu()
            dtype = str(flat.dtype).removeprefix("torch.")
            entries.append(_StateEntry(key, dtype, flat.numel(), None, value.dim() == 0))
            payloads.append(bytes(bytes_of(flat)))
        else:
            entries.append(_StateEntry(key, number=value))
    head = msgspec.json.encode(entries)
    return b"".join([_LENGTH.pack(len(head)), head, *payloads])


def decode_state(data: memoryview, *, elems: int) -> dict[str, Any]:
    """The inverse of `encode_state`; tensors must have ``elems`` elements or be scalars."""
    try:
        (head_bytes,) = _LENGTH.unpack_from(data)
        entries = _ENTRIES.decode(data[_LENGTH.size : _LENGTH.size + head_bytes])
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not an optimizer state: {error}") from error
    if len(entries) > _STATE_ENTRIES_LIMIT:
        raise RemoteProtocolError(
            f"an optimizer state of {len(entries)} entries; at most {_STATE_ENTRIES_LIMIT}"
        )
    rest = data[_LENGTH.size + head_bytes :]
    state: dict[str, Any] = {}
    for entry in entries:
        if not entry.dtype:
            state[entry.key] = entry.number
            continue
        wanted = 1 if entry.scalar else elems
        dtype = _STATE_DTYPES.get(entry.dtype)
        if dtype is None or entry.elems != wanted or len(rest) < wanted * dtype.itemsize:
            raise RemoteProtocolError(
                f"optimizer state {entry.key!r} has {entry.elems} elements of {entry.dtype},"
                f" not {wanted}"
            )
        tensor = torch.empty(wanted, dtype=dtype)
        bytes_of(tensor)[:] = rest[: wanted * dtype.itemsize]
        rest = rest[wanted * dtype.itemsize :]
        state[entry.key] = tensor.reshape(()) if entry.scalar else tensor
    if rest:
        raise RemoteProtocolError(f"{len(rest)} bytes too many after an optimizer state")
    return state


_AT_ONCE_ELEMS = 65_536
"""Few enough for the cache, and for the sum of a bin to stay below 2**53, where it is exact."""
_LEAST_TOP = -36
"""So that 2**(-_LEAST_TOP * BIN_BITS) is finite; lower squares are of float64 only, and nothing."""


_HALVES = (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype, *, workers: int) -> torch.dtype:
    """What gradients of several workers are added up in: half precision would lose small ones."""
    return torch.float32 if dtype in _HALVES and workers > 1 else dtype


def add_up(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum in the given order, in the first one's memory unless ``dtype`` is another."""
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total += gradient
    return total


def finish_sum(
    total: torch.Tensor, reduction: Reduction, *, workers: int, scale: float = 1.0
) -> None:
    """The ranks' gradients have been added up: make the mean, and take out the loss's scale."""
    if workers > 1 and reduction == "mean":
        total /= workers
    if scale != 1.0:
        total *= 1.0 / scale


def start_average(parameter: torch.Tensor) -> torch.Tensor:
    """A moving average that begins with the parameter's value; in float32 at least."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(wide, copy=True)


def move_average(average: torch.Tensor, parameter: torch.Tensor, decay: float) -> None:
    """``average = decay * average + (1 - decay) * parameter``."""
    average.lerp_(parameter.detach().to(average.dtype), 1 - decay)


def square_sum(gradient: torch.Tensor) -> SquareSum:
    """Of all elements; the same for any way of cutting the gradient."""
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
    """By norm, whose ``coefficient`` it is, or element by element, as ``torch.nn.utils`` does."""
    if coefficient != 1.0:
        gradient *= coefficient
    limit = aggregation.clip_grad_value
    if limit is not None:
        gradient.clamp_(-limit, limit)
