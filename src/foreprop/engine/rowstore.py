"""A server's rows: its shards' tables, the gradients in flight, the optimizer's state.

The update is a real ``torch.optim`` optimizer's, given a sparse gradient: torch's own semantics of
SGD, Adagrad and SparseAdam on touched rows, nothing re-implemented.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.rows import Shard
from foreprop.engine.aggregation import clip, finish_sum, square_sum, start_average
from foreprop.engine.rowaverages import RowAverages
from foreprop.engine.rowparts import RowPart, decode_part, part_limit_bytes
from foreprop.engine.slicestore import (
    AVERAGE,
    DTYPES,
    MASTER,
    PartOptimizer,
    bytes_of,
    decode_state,
    encode_state,
    state_limit_bytes,
)
from foreprop.errors import RemoteProtocolError

SPARSE_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls for cls in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
}
"""Each leaves rows without a gradient as they are; see `training.optimizer.check_row_wise`."""

_HALVES = (torch.bfloat16, torch.float16)


class _ShardTensors:
    __slots__ = (
        "averages",
        "gradients",
        "optimizer",
        "parameter",
        "shard",
        "staged",
        "total",
        "wire_dtype",
    )

    def __init__(
        self,
        shard: Shard,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        optimizer: type[torch.optim.Optimizer],
    ) -> None:
        self.shard = shard
        self.wire_dtype = wire_dtype
        self.parameter = torch.nn.Parameter(torch.zeros(shard.rows, shard.row_elems, dtype=dtype))
        self.gradients: dict[tuple[int, int], list[RowPart]] = {}  # by step and rank
        self.staged: list[RowPart] = []  # values for the next update
        self.averages: RowAverages | None = None  # moving, from the first update on
        self.total: RowPart | None = None  # the gradients' sum, if made before the update
        self.optimizer = PartOptimizer(optimizer, self.parameter)


class RowStore:
    """The tensors of one server's shards.

    Methods are called with the server's lock held, but for `aggregate` and `update`: one thread per
    shard.
    """

    def __init__(self, manifest: Manifest, shards: Sequence[Shard], index: int) -> None:
        self._world_size = manifest.world_size
        self._aggregation = manifest.knobs.aggregation
        optimizer = SPARSE_OPTIMIZERS.get(manifest.optimizer.name, torch.optim.Optimizer)
        self._group_of = [info.group for info in manifest.parameters]
        self._reductions = manifest.reductions()
        dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        self._shards = {
            shard.number: _ShardTensors(
                shard, dtypes[shard.parameter], wire_dtypes[shard.parameter], optimizer
            )
            for shard in shards
            if shard.server == index
        }

    def __contains__(self, shard: int) -> bool:
        return shard in self._shards

    def numbers(self) -> Iterable[int]:
        return self._shards

    def shard(self, number: int) -> Shard:
        return self._shards[number].shard

    def part_limit_bytes(self, number: int) -> int:
        tensors = self._shards[number]
        return part_limit_bytes(tensors.shard, tensors.parameter.dtype.itemsize)

    def put_gradient(self, number: int, rank: int, step: int, data: memoryview) -> None:
        """Keep a part of a worker's gradient; raises `RemoteProtocolError` if it does not fit."""
        tensors = self._shards[number]
        part = decode_part(data, tensors.shard, tensors.wire_dtype)
        tensors.gradients.setdefault((step, rank), []).append(part)

    def put_value(self, number: int, data: memoryview) -> None:
        tensors = self._shards[number]
        tensors.staged.append(decode_part(data, tensors.shard, tensors.parameter.dtype))

    def install_values(self, number: int, *, shown: bool = False) -> None:
        """Take the values that rank 0 sent. Gradients must be disabled.

        If rows have been ``shown`` in the wire's type, an element that is still what was shown was
        not changed by hand, and keeps what the cast had rounded off.
        """
        tensors = self._shards[number]
        cast = tensors.wire_dtype != tensors.parameter.dtype
        for numbers, values in tensors.staged:
            if cast and shown:
                kept = tensors.parameter[numbers]
                same = values == kept.to(tensors.wire_dtype)
                tensors.parameter[numbers] = torch.where(same, kept, values)
            else:
                tensors.parameter[numbers] = values
        tensors.staged.clear()

    def take_gradients(self, number: int, step: int, ranks: Sequence[int]) -> list[list[RowPart]]:
        """Each rank's parts of this step, which the store forgets."""
        gradients = self._shards[number].gradients
        taken = [gradients.pop((step, rank), []) for rank in ranks]
        for key in [key for key in gradients if key[0] == step]:  # of ranks without a gradient
            del gradients[key]
        return taken

    def aggregate(
        self, number: int, gradients: Sequence[list[RowPart]], scale: float = 1.0
    ) -> SquareSum:
        """Do the first half of `update` ahead; returns the sum of the gradient's squares.

        ``scale`` is that of the loss.
        """
        tensors = self._shards[number]
        tensors.total = self._total(gradients, tensors, scale)
        return ZERO if tensors.total is None else square_sum(tensors.total.rows)

    def update(
        self,
        number: int,
        gradients: Sequence[list[RowPart]],
        groups: Sequence[Hyperparameters],
        coefficient: float = 1.0,
    ) -> None:
        """Aggregate the gradients, adding in rank order, and apply ``coefficient`` of them.

        Or of what has been aggregated ahead. Without ``groups`` nothing is applied. The calling
        thread must have gradients disabled (``torch.set_grad_enabled(False)``).
        """
        tensors = self._shards[number]
        if tensors.averages is not None and tensors.staged:
            tensors.averages.before_change()
        self.install_values(number, shown=True)
        averages = tensors.averages = tensors.averages or self._new_averages(tensors)
        total, tensors.total = tensors.total, None
        if total is None:
            total = self._total(gradients, tensors)
        if total is not None and groups:
            if averages is not None:
                averages.before_change(total.numbers)
            self._apply(tensors, total, groups, coefficient)
        if averages is not None:
            averages.end_step()

    def _new_averages(self, tensors: _ShardTensors) -> RowAverages | None:
        decay = self._aggregation.ema
        return None if decay is None else RowAverages(tensors.parameter, decay)

    def _apply(
        self,
        tensors: _ShardTensors,
        total: RowPart,
        groups: Sequence[Hyperparameters],
        coefficient: float,
    ) -> None:
        optimizer = tensors.optimizer.prepare(groups[self._group_of[tensors.shard.parameter]])
        clip(total.rows, self._aggregation, coefficient)
        tensors.parameter.grad = torch.sparse_coo_tensor(
            total.numbers[None],
            total.rows.to(tensors.parameter.dtype),
            tensors.parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        optimizer.step()
        tensors.parameter.grad = None

    def _total(
        self, gradients: Sequence[list[RowPart]], tensors: _ShardTensors, scale: float = 1.0
    ) -> RowPart | None:
        """The aggregated gradient, not clipped; None if nobody had one.

        One without rows is another matter: a step is counted.
        """
        parts = [part for of_rank in gradients for part in of_rank]
        if not parts:
            return None
        touched, places = torch.unique(
            torch.cat([part.numbers for part in parts]), return_inverse=True
        )
        dtype = tensors.parameter.dtype
        if dtype in _HALVES and self._world_size > 1:
            dtype = torch.float32
        total = torch.zeros(len(touched), tensors.shard.row_elems, dtype=dtype)
        start = 0
        for part in parts:
            stop = start + len(part.numbers)
            # a part has each row once, so that this adds in one order only
            total.index_add_(0, places[start:stop], part.rows.to(dtype))
            start = stop
        reduction = self._reductions[tensors.shard.parameter]
        finish_sum(total, reduction, workers=self._world_size, scale=scale)
        return RowPart(touched, total)

    def rows(self, number: int, numbers: torch.Tensor, step: int) -> bytes:
        """A copy of these rows' bytes: in the wire's type, but in full as they are at the start."""
        tensors = self._shards[number]
        found = tensors.parameter.detach().index_select(0, numbers)
        return bytes(bytes_of(found.to(tensors.wire_dtype) if step else found))

    # Optimizer state, for checkpoints.
    def export_state(self, number: int) -> bytes:
        """As `slicestore.encode_state` writes it."""
        return encode_state(self._shards[number].optimizer.state)

    def export_master(self, number: int) -> bytes:
        """The shard's values in full, as a state of one tensor."""
        return encode_state({MASTER: self._shards[number].parameter})

    def import_state(self, number: int, data: memoryview) -> None:
        """Replace the shard's optimizer state; raises `RemoteProtocolError` if it does not fit."""
        tensors = self._shards[number]
        shape = tensors.parameter.shape
        state = decode_state(data, elems=tensors.parameter.numel())
        tensors.optimizer.replace_state(
            {
                key: value.view(shape) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in state.items()
            }
        )

    # Moving averages.
    def export_average(self, number: int) -> bytes:
        """The shard's moving averages, as a state of one tensor."""
        tensors = self._shards[number]
        if tensors.averages is None:
            return encode_state({AVERAGE: start_average(tensors.parameter).reshape(-1)})
        return encode_state({AVERAGE: tensors.averages.current().reshape(-1)})

    def import_average(self, number: int, data: memoryview) -> None:
        """Go on from these averages; raises `RemoteProtocolError` if they do not fit."""
        tensors = self._shards[number]
        value = decode_state(data, elems=tensors.parameter.numel()).get(AVERAGE)
        averages = tensors.averages or self._new_averages(tensors)
        if averages is None or not isinstance(value, torch.Tensor) or not value.dim():
            raise RemoteProtocolError(f"a moving average for shard {number}, which has none")
        averages.replace(value.view(tensors.parameter.shape))
        tensors.averages = averages

    def state_limit_bytes(self, number: int) -> int:
        return state_limit_bytes(self._shards[number].parameter.numel())
