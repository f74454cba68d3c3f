"""A server's tensors: its slices' parameters, the gradients in flight, the optimizer's state.

Sums are made in rank order and the update by a real ``torch.optim`` optimizer, one per slice, so
nothing is re-implemented and no bit depends on timing, slice size or the number of servers.

torch's kernels treat what is left over after whole vectors one by one, and in half precision that
rounds differently. So every tensor here is padded with zeros to the vectors of the whole parameter:
an element is treated as it would be there, wherever a slice begins and ends.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec
import torch

from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.slicing import Slice
from foreprop.errors import InternalError, RemoteProtocolError
from foreprop.path.summing import (
    clip,
    finish_sum,
    move_average,
    square_sum,
    start_average,
)

ELEMENTWISE_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls
    for cls in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    )
}
"""Each updates every element from that element alone, so it gives the same bits on slices."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HALVES = (torch.bfloat16, torch.float16)
_VECTOR_ELEMS = 64
"""A multiple of what torch's kernels take at a time: two AVX-512 registers of half precision."""
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


class PartOptimizer:
    """The optimizer of one slice; made for its first update, with the group of that."""

    __slots__ = ("_cls", "_group", "_made", "_options", "_parameter", "_received")

    def __init__(
        self, cls: type[torch.optim.Optimizer], parameter: torch.nn.Parameter, **options: Any
    ) -> None:
        self._cls = cls
        self._parameter = parameter
        self._options = options
        self._made: torch.optim.Optimizer | None = None
        self._group: Hyperparameters | None = None
        self._received: dict[str, Any] | None = None  # a state, to be used from the next update

    def prepare(self, group: Hyperparameters) -> torch.optim.Optimizer:
        """For an update with these numbers, and with a state that has been received since."""
        if self._made is None:
            self._made = self._cls([self._parameter], **optimizer_arguments(group), **self._options)
        elif self._group is not group:
            self._made.param_groups[0].update(optimizer_arguments(group))
        self._group = group
        if self._received is not None:
            self._made.state[self._parameter] = self._received
            self._received = None
        return self._made

    @property
    def state(self) -> Mapping[str, Any]:
        """As the next update will find it."""
        if self._received is not None:
            return self._received
        return {} if self._made is None else self._made.state.get(self._parameter, {})

    def replace_state(self, state: dict[str, Any]) -> None:
        """From the next update on; an empty one is an optimizer's own at its start."""
        self._received = state or None
        if self._received is None:
            self._made = None


class _SliceTensors:
    __slots__ = (
        "average",
        "extent",
        "gradients",
        "kept",
        "optimizer",
        "parameter",
        "piece",
        "shown",
        "staged",
        "total",
        "view",
        "wire_dtype",
    )

    def __init__(
        self,
        piece: Slice,
        parameter_elems: int,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        optimizer: type[torch.optim.Optimizer],
    ) -> None:
        self.piece = piece
        self.extent = extent_of(piece, parameter_elems)
        self.parameter = torch.nn.Parameter(self.extent.zeros(dtype))
        self.wire_dtype = wire_dtype
        self.shown: torch.Tensor | None = None  # the parameter as cast for the last replies
        self.view = bytes_of(self.extent.part(self.parameter))  # what replies carry
        self.gradients: dict[int, GradientBuffer] = {}
        self.kept: GradientBuffer | None = None  # the aggregated gradient, while replies carry it
        self.staged: GradientBuffer | None = None
        self.average: torch.Tensor | None = None  # moving, if there is one
        self.total: torch.Tensor | None = None  # the gradients' sum, if made before the update
        # foreach=False: what one tensor gets by default, without looking into it each time
        self.optimizer = PartOptimizer(optimizer, self.parameter, foreach=False)


class SliceStore:
    """The tensors of one server's slices.

    Methods are called with the server's lock held, but for `update`: one thread at a time.
    """

    def __init__(self, manifest: Manifest, slices: Sequence[Slice], index: int) -> None:
        self._world_size = manifest.world_size
        self._aggregation = manifest.knobs.aggregation
        optimizer = ELEMENTWISE_OPTIMIZERS.get(manifest.optimizer.name, torch.optim.Optimizer)
        # the bare function: torch's wrappers (profiler, hooks) cost as much as a small update
        self._step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(optimizer.step)
        self._group_of = [info.group for info in manifest.parameters]
        self._reductions = manifest.reductions()
        dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        self._slices = {
            piece.number: _SliceTensors(
                piece,
                manifest.parameters[piece.parameter].elems,
                dtypes[piece.parameter],
                wire_dtypes[piece.parameter],
                optimizer,
            )
            for piece in slices
            if piece.server == index
        }
        self._pool: dict[tuple[Extent, torch.dtype], list[GradientBuffer]] = {}

    def values(self, slice_: int) -> memoryview:
        """The slice's parameters as bytes, for replies.

        In full before the first update, so that all ranks start from the same values; from then on
        in the wire's type.
        """
        return self._slices[slice_].view

    def size_bytes(self, slice_: int, *, value: bool = False) -> int:
        """Of a gradient, in the wire's type, or of a value, which comes in full."""
        tensors = self._slices[slice_]
        return tensors.piece.elems * _arriving_dtype(tensors, value=value).itemsize

    def take_buffer(self, slice_: int, *, value: bool = False) -> GradientBuffer:
        """For a gradient or a value; see `size_bytes`."""
        tensors = self._slices[slice_]
        key = (tensors.extent, _arriving_dtype(tensors, value=value))
        free = self._pool.get(key)
        return free.pop() if free else GradientBuffer(*key)

    def put_gradient(self, slice_: int, rank: int, buffer: GradientBuffer) -> None:
        self._slices[slice_].gradients[rank] = buffer

    def put_value(self, slice_: int, buffer: GradientBuffer) -> None:
        self._slices[slice_].staged = buffer

    def install_value(self, slice_: int) -> None:
        """Take the values that rank 0 sent as the slice's parameters.

        An element that is still what workers were shown was not changed by hand, and keeps what
        the cast to the wire's type had rounded off.
        """
        tensors = self._slices[slice_]
        if tensors.staged is not None:
            values = tensors.staged.tensor
            if tensors.shown is not None:
                values = torch.where(values == tensors.shown, tensors.parameter, values)
            tensors.parameter.copy_(values)
            self._give_back(tensors.staged)
            tensors.staged = None

    def aggregate(self, slice_: int, ranks: Sequence[int], scale: float = 1.0) -> SquareSum:
        """Do the first half of `update` ahead; returns the sum of the gradient's squares.

        ``scale`` is that of the loss.
        """
        tensors = self._slices[slice_]
        total = tensors.total = self._total(tensors, ranks, scale)
        for rank, buffer in list(tensors.gradients.items()):
            if buffer.tensor is not total:  # all slices wait together: keep no more than the sums
                self._give_back(tensors.gradients.pop(rank))
        return square_sum(tensors.extent.part(tensors.total))

    def update(
        self,
        slice_: int,
        ranks: Sequence[int],
        groups: Sequence[Hyperparameters],
        coefficient: float = 1.0,
    ) -> None:
        """Aggregate the gradients of ``ranks``, in rank order, and apply ``coefficient`` of them.

        The calling thread must have gradients disabled (``torch.set_grad_enabled(False)``).
        """
        tensors, decay = self._slices[slice_], self._aggregation.ema
        changed = bool(ranks) or (tensors.staged is not None and tensors.shown is not None)
        self.install_value(slice_)
        if decay is not None and tensors.average is None:
            tensors.average = start_average(tensors.parameter)
        if ranks:
            self._apply(tensors, ranks, groups, coefficient)
        self._drop_gradients(tensors)
        if decay is not None and tensors.average is not None:
            move_average(tensors.average, tensors.parameter, decay)
        if changed and tensors.wire_dtype != tensors.parameter.dtype:
            _show(tensors)

    def aggregate_only(
        self, slice_: int, ranks: Sequence[int], *, measure: bool
    ) -> SquareSum | None:
        """Aggregate the gradients of ``ranks``, which is what the replies carry: workers update.

        Returns the sum of its squares, if that is asked for.

        As `update` otherwise. Its last replies have left: each worker has pushed again since.
        """
        tensors = self._slices[slice_]
        squares = ZERO if measure else None
        if ranks:
            kept = self._keep(tensors, self._total(tensors, ranks))
            tensors.view = kept.view
            if measure:
                squares = square_sum(tensors.extent.part(kept.tensor))
        self._drop_gradients(tensors)
        return squares

    def _apply(
        self,
        tensors: _SliceTensors,
        ranks: Sequence[int],
        groups: Sequence[Hyperparameters],
        coefficient: float,
    ) -> None:
        optimizer = tensors.optimizer.prepare(groups[self._group_of[tensors.piece.parameter]])
        total = tensors.total if tensors.total is not None else self._total(tensors, ranks)
        clip(total, self._aggregation, coefficient)
        dtype = tensors.parameter.dtype
        tensors.parameter.grad = total if total.dtype == dtype else total.to(dtype)
        self._step(optimizer)
        tensors.parameter.grad = None
        self._keep(tensors, total)

    def _keep(self, tensors: _SliceTensors, total: torch.Tensor) -> GradientBuffer:
        """The aggregated gradient is read by whoever wants, until all workers have pushed again."""
        if tensors.kept is not None:
            self._give_back(tensors.kept)
        for rank, buffer in tensors.gradients.items():
            if buffer.tensor is total:
                tensors.kept = tensors.gradients.pop(rank)
                return tensors.kept
        tensors.kept = self.take_buffer(tensors.piece.number)
        tensors.kept.tensor.copy_(total)  # added up in more than the wire's type
        return tensors.kept

    def _drop_gradients(self, tensors: _SliceTensors) -> None:
        """They have been applied, or the step is left out."""
        tensors.total = None
        for buffer in tensors.gradients.values():
            self._give_back(buffer)
        tensors.gradients.clear()

    def _total(
        self, tensors: _SliceTensors, ranks: Sequence[int], scale: float = 1.0
    ) -> torch.Tensor:
        """The aggregated gradient, not clipped; may be in the memory of the first rank's."""
        total = tensors.gradients[ranks[0]].tensor
        dtype = total.dtype
        cast = dtype != tensors.parameter.dtype
        if dtype in _HALVES and (cast or self._world_size > 1):
            total = total.float()  # summing in half precision would lose small gradients
        for rank in ranks[1:]:
            total += tensors.gradients[rank].tensor
        reduction = self._reductions[tensors.piece.parameter]
        finish_sum(total, reduction, workers=self._world_size, scale=scale)
        return total

    def _give_back(self, buffer: GradientBuffer) -> None:
        key = (buffer.extent, buffer.tensor.dtype)
        self._pool.setdefault(key, []).append(buffer)

    # Optimizer state, for checkpoints.
    def export_state(self, slice_: int) -> bytes:
        """The slice's optimizer state: a length, a JSON list of entries, then tensors' bytes."""
        tensors = self._slices[slice_]
        part, state = tensors.extent.part, tensors.optimizer.state
        return encode_state(
            {key: part(value) if is_array(value) else value for key, value in state.items()}
        )

    def import_state(self, slice_: int, data: memoryview) -> None:
        """Replace the slice's optimizer state; raises `RemoteProtocolError` if it does not fit."""
        tensors = self._slices[slice_]
        state = decode_state(data, elems=tensors.piece.elems)
        tensors.optimizer.replace_state(
            {
                key: _with_padding(value, tensors.extent) if is_array(value) else value
                for key, value in state.items()
            }
        )

    def export_master(self, slice_: int) -> bytes:
        """The slice's values in full, as a state of one tensor."""
        tensors = self._slices[slice_]
        return encode_state({MASTER: tensors.extent.part(tensors.parameter)})

    def export_gradient(self, slice_: int) -> bytes:
        """The aggregated gradient of the slice's last update, as a state of one tensor."""
        tensors = self._slices[slice_]
        if tensors.kept is None:
            raise RemoteProtocolError(f"the gradient of slice {slice_} is not kept")
        return encode_state({GRADIENT: tensors.extent.part(tensors.kept.tensor)})

    # Moving averages.
    def export_average(self, slice_: int) -> bytes:
        """The slice's moving average, as a state of one tensor."""
        tensors = self._slices[slice_]
        average = tensors.average
        if average is None:
            average = start_average(tensors.parameter)
        return encode_state({AVERAGE: tensors.extent.part(average)})

    def import_average(self, slice_: int, data: memoryview) -> None:
        """Go on from this average; raises `RemoteProtocolError` if it does not fit."""
        tensors = self._slices[slice_]
        value = decode_state(data, elems=tensors.piece.elems).get(AVERAGE)
        if self._aggregation.ema is None or not isinstance(value, torch.Tensor) or not value.dim():
            raise RemoteProtocolError(f"a moving average for slice {slice_}, which has none")
        average = start_average(tensors.parameter)
        tensors.extent.part(average).copy_(value)
        tensors.average = average

    def state_limit_bytes(self, slice_: int) -> int:
        return state_limit_bytes(self._slices[slice_].piece.elems)


def _arriving_dtype(tensors: _SliceTensors, *, value: bool) -> torch.dtype:
    return tensors.parameter.dtype if value else tensors.wire_dtype


def _show(tensors: _SliceTensors) -> None:
    """Cast the parameter for the replies: once, for all workers, so that all see the same bits."""
    if tensors.shown is None:
        tensors.shown = tensors.extent.zeros(tensors.wire_dtype)
        tensors.view = bytes_of(tensors.extent.part(tensors.shown))
    tensors.shown.copy_(tensors.parameter)


def is_array(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _with_padding(value: torch.Tensor, extent: Extent) -> torch.Tensor:
    tensor = extent.zeros(value.dtype)
    extent.part(tensor)[:] = value
    return tensor


def optimizer_arguments(group: Hyperparameters) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in group.items():
        key, _, dtype = name.partition(" ")
        if dtype:  # the user gave a tensor, see `hyperparameters`
            arguments[key] = torch.tensor(value, dtype=DTYPES[dtype])
        else:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return arguments


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
