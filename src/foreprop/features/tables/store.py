"""A server's rows: its shards' tables, the gradients in flight, the optimizer's state.

The update is a real ``torch.optim`` optimizer's, given a sparse gradient: torch's own semantics of
SGD, Adagrad and SparseAdam on touched rows, nothing re-implemented. The rows of a remote table are
made here, and take memory from their first update on. For both see `tables.rowtable`.

An ``import_`` raises `RemoteProtocolError` for what does not fit the shard.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foreprop.core.manifest import Hyperparameters, Manifest, ParameterInfo
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.slicing import Shard
from foreprop.engine.memory import bytes_of
from foreprop.engine.sums import clip, finish_sum, square_sum, start_average, sum_dtype
from foreprop.engine.tensors import (
    AVERAGE,
    DTYPES,
    MASTER,
    decode_state,
    encode_state,
    is_array,
    state_limit_bytes,
)
from foreprop.errors import RemoteProtocolError
from foreprop.features.tables.parts import (
    END,
    STATE,
    VALUES,
    KeptRows,
    RowPart,
    decode_kept,
    decode_kept_pull,
    encode_kept,
    kept_limit_bytes,
    rows_at_once,
    sum_parts,
)
from foreprop.features.tables.rowtable import (
    SPARSE_OPTIMIZERS,
    Make,
    RowAverages,
    RowOptimizer,
    RowTable,
    make_rows,
)


@dataclass(slots=True, eq=False)
class _ShardTensors:
    shard: Shard
    wire_dtype: torch.dtype
    table: RowTable
    optimizer: RowOptimizer
    # the pushed parts, by step and rank
    gradients: dict[tuple[int, int], list[RowPart]] = field(default_factory=dict)
    staged: list[RowPart] = field(default_factory=list)  # values for the next update
    averages: RowAverages | None = None  # there from the first update on
    totals: dict[tuple[int, ...] | None, RowPart | None] = field(default_factory=dict)
    """The sums that were made ahead of the update, by the ranks that are counted."""
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while values, states or averages are changed or copied."""


class RowStore:
    """The tensors of one server's shards.

    Methods are called with the server's lock held, but for `aggregate` and `update`. These are
    called by one thread per shard, which must not record gradients.
    """

    def __init__(self, manifest: Manifest, shards: Sequence[Shard], index: int) -> None:
        self._manifest = manifest
        self._world_size = manifest.world_size
        self._aggregation = manifest.knobs.aggregation
        self._decay = manifest.decay_per_update
        self._reductions = manifest.reductions()
        wire_dtypes = manifest.wire_dtypes()
        self._shards = {
            shard.number: self._tensors_of(shard, DTYPES[wire_dtypes[shard.parameter]])
            for shard in shards
            if shard.server == index
        }

    def _tensors_of(self, shard: Shard, wire_dtype: torch.dtype) -> _ShardTensors:
        manifest = self._manifest
        info = manifest.parameters[shard.parameter]
        dtype, shape = DTYPES[info.dtype], (shard.rows, shard.row_elems)
        group = manifest.optimizer.groups[info.group]
        table = RowTable(*shape, dtype, self._make_of(shard, info))
        optimizer = RowOptimizer(SPARSE_OPTIMIZERS[manifest.optimizer.name], table, group)
        return _ShardTensors(shard, wire_dtype, table, optimizer)

    def _make_of(self, shard: Shard, info: ParameterInfo) -> Make | None:
        """What makes this shard's rows as they begin, if the server does."""
        init, servers, dtype = info.init, self._manifest.knobs.servers, DTYPES[info.dtype]
        if init is None:
            return None

        def make(numbers: torch.Tensor) -> torch.Tensor:
            return make_rows(init, numbers * servers + shard.server, shard.row_elems, dtype)

        return make

    def put_gradient(self, number: int, rank: int, step: int, part: RowPart) -> None:
        self._shards[number].gradients.setdefault((step, rank), []).append(part)

    def put_value(self, number: int, part: RowPart) -> None:
        self._shards[number].staged.append(part)

    def install_values(self, number: int, *, shown: bool = False) -> None:
        """Take the values that rank 0 sent; no gradients may be recorded.

        If rows have been ``shown`` in the wire's type, an element that is still what was shown was
        not changed by hand, and keeps what the cast had rounded off.
        """
        tensors = self._shards[number]
        cast = tensors.wire_dtype != tensors.table.dtype
        for numbers, values in tensors.staged:
            if cast and shown:
                kept = tensors.table.take(numbers)
                same = values == kept.to(tensors.wire_dtype)
                tensors.table.put(numbers, torch.where(same, kept, values))
            else:
                tensors.table.put(numbers, values)
        tensors.staged.clear()

    def take_gradients(self, number: int, step: int, ranks: Sequence[int]) -> list[RowPart]:
        """The ranks' parts of this step, in the ranks' order; the store forgets them."""
        gradients = self._shards[number].gradients
        return [part for rank in ranks for part in gradients.pop((step, rank), ())]

    def drop(self, number: int, rank: int, step: int) -> None:
        """Forget what the rank has pushed for this step: it does not count."""
        self._shards[number].gradients.pop((step, rank), None)

    def aggregate(
        self,
        number: int,
        gradients: Sequence[RowPart],
        scale: float,
        counted: tuple[int, ...] | None = None,
    ) -> SquareSum:
        """Do the first half of `update` ahead; returns the sum of the gradient's squares.

        ``scale`` is that of the loss.
        """
        tensors = self._shards[number]
        total = tensors.totals[counted] = self._total(gradients, tensors, scale, counted=counted)
        return ZERO if total is None else square_sum(total.rows)

    def update(
        self,
        number: int,
        gradients: Sequence[RowPart],
        groups: Sequence[Hyperparameters],
        coefficient: float = 1.0,
        *,
        counted: tuple[int, ...] | None = None,
    ) -> None:
        """Aggregate the gradients, adding in rank order, and apply ``coefficient`` of them.

        If they have been aggregated ahead, that sum is applied. The mean is over the ranks
        ``counted``, with a gradient or without; None: over all. Without ``groups`` nothing is
        applied.
        """
        tensors = self._shards[number]
        total = tensors.totals.pop(counted, None)
        if total is None:
            total = self._total(gradients, tensors, counted=counted)
        with tensors.writing:
            if tensors.averages is not None and tensors.staged:
                tensors.averages.before_change()
            self.install_values(number, shown=True)
            averages = self._averages_of(tensors)
            if total is not None and groups:
                if averages is not None:
                    averages.before_change(total.numbers)
                clip(total.rows, self._aggregation, coefficient)
                group = groups[self._manifest.parameters[tensors.shard.parameter].group]
                values = tensors.table.take(total.numbers)
                gradient = total.rows.to(values.dtype)
                tensors.optimizer.step(total.numbers, values, gradient, group)
            if averages is not None:
                averages.end_step()

    def _averages_of(self, tensors: _ShardTensors) -> RowAverages | None:
        if tensors.averages is None and self._decay is not None:
            tensors.averages = RowAverages(tensors.table, self._decay)
        return tensors.averages

    def _total(
        self,
        parts: Sequence[RowPart],
        tensors: _ShardTensors,
        scale: float = 1.0,
        *,
        counted: Sequence[int] | None = None,
    ) -> RowPart | None:
        """The aggregated gradient, not clipped; None if nobody had one."""
        if not parts:  # a gradient without rows is another matter: its step is counted
            return None
        shard = tensors.shard
        dtype = sum_dtype(tensors.table.dtype, workers=self._world_size)
        total = sum_parts(parts, shard.row_elems, dtype)
        reduction, workers = self._reductions[shard.parameter], self._manifest.mean_over(counted)
        finish_sum(total.rows, reduction, workers=workers, scale=scale, out=total.rows)
        return total

    def rows(self, number: int, numbers: torch.Tensor, step: int) -> bytes:
        """A copy of these rows' bytes: in the wire's type, but at the start (step 0) in full."""
        tensors = self._shards[number]
        found = tensors.table.take(numbers)
        return bytes(bytes_of(found.to(tensors.wire_dtype) if step else found))

    # Whole shards' optimizer state, for checkpoints of tables that workers have, too.
    def export_state(self, number: int) -> bytes:
        tensors = self._shards[number]
        with tensors.writing:
            return encode_state(tensors.optimizer.whole)

    def export_master(self, number: int) -> bytes:
        """The shard's values in full, as a state of one tensor."""
        tensors = self._shards[number]
        with tensors.writing:
            return encode_state({MASTER: tensors.table.whole})

    def import_state(self, number: int, data: memoryview) -> None:
        tensors = self._shards[number]
        shape = (tensors.shard.rows, tensors.shard.row_elems)
        state = decode_state(data, elems=tensors.shard.elems)
        tensors.optimizer.replace(
            {key: value.view(shape) if is_array(value) else value for key, value in state.items()}
        )

    # Moving averages.
    def export_average(self, number: int) -> bytes:
        tensors = self._shards[number]
        with tensors.writing:
            averages, whole = tensors.averages, tensors.table.whole
            current = start_average(whole) if averages is None else averages.current()
            return encode_state({AVERAGE: current.reshape(-1)})

    def import_average(self, number: int, data: memoryview) -> None:
        tensors = self._shards[number]
        value = decode_state(data, elems=tensors.shard.elems).get(AVERAGE)
        averages = self._averages_of(tensors)
        if averages is None or not is_array(value):
            raise RemoteProtocolError(f"a moving average for shard {number}, which has none")
        rows = tensors.shard.rows
        averages.put(torch.arange(rows), value.view(rows, tensors.shard.row_elems))

    def state_limit_bytes(self, number: int) -> int:
        return state_limit_bytes(self._shards[number].shard.elems)

    # All that there is of a remote table, in parts.
    def export_kept(self, number: int, data: memoryview) -> bytes:
        tensors = self._remote(number)
        limit = rows_at_once(tensors.shard)
        first = decode_kept_pull(data, tensors.shard)
        with tensors.writing:
            numbers = tensors.table.kept_at(first, limit)
            entries = {VALUES: tensors.table.take(numbers)}
            if tensors.averages is not None:
                entries[AVERAGE] = tensors.averages.of(numbers)
            state = tensors.optimizer.state_of(numbers)
        following = first + limit if len(numbers) == limit else END
        entries |= {STATE + key: value for key, value in state.items()}
        return encode_kept(KeptRows(numbers, entries, following))

    def import_kept(self, number: int, data: memoryview, *, anew: bool) -> None:
        """Replace rows' values, states and averages, as far as the part has them.

        With ``anew`` all others are forgotten. No update may be under way.
        """
        tensors = self._remote(number)
        numbers, entries, _ = decode_kept(data, tensors.shard)
        values, average = entries.get(VALUES), entries.get(AVERAGE)
        for name, value in ((VALUES, values), (AVERAGE, average)):
            if value is not None and not is_array(value):
                raise RemoteProtocolError(f"{name} of rows is {value!r}, not rows")
        if anew:
            tensors.table.forget()
            tensors.optimizer.forget()
            tensors.averages = None
        if values is not None:
            if tensors.averages is not None:
                tensors.averages.before_change(numbers)
            tensors.table.put(numbers, values.to(tensors.table.dtype))
        if average is not None and (averages := self._averages_of(tensors)) is not None:
            averages.put(numbers, average)
        size = len(STATE)
        state = {key[size:]: v for key, v in entries.items() if key.startswith(STATE)}
        tensors.optimizer.put(numbers, state)

    def kept_limit_bytes(self, number: int) -> int:
        return kept_limit_bytes(self._remote(number).shard)

    def _remote(self, number: int) -> _ShardTensors:
        tensors = self._shards.get(number)
        if tensors is None or not tensors.shard.remote:
            raise RemoteProtocolError(f"shard {number} is not of a remote table, or not here")
        return tensors
