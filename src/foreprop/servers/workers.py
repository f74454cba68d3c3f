"""Where a worker's end is put together: its engine, and the features of the session.

The manifest says which those are; others are imported when somebody needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreprop.config import Config
from foreprop.core.manifest import Manifest
from foreprop.core.wire import Kind
from foreprop.link.connection import Later
from foreprop.link.stream import Stream
from foreprop.observe.trace import TraceRecorder
from foreprop.path.memory import ParameterMemory
from foreprop.path.worker import WorkerEngine

if TYPE_CHECKING:
    from foreprop.numerics.norms import WorkerNorm
    from foreprop.tables.exchange import RowExchange


class Worker:
    """A worker's engine, and the features that its session has; the arguments are the engine's."""

    def __init__(
        self,
        manifest: Manifest,
        memory: Sequence[ParameterMemory],
        streams: Sequence[Stream],
        *,
        rank: int,
        config: Config,
        trace: TraceRecorder | None = None,
        servers: Sequence[str] | None = None,
    ) -> None:
        self.engine = WorkerEngine(
            manifest, memory, streams, rank=rank, config=config, trace=trace, servers=servers
        )
        self._rows = Later({Kind.ROWS_REPLY, Kind.TABLE_REPLY}, self._make_rows)
        self._norm = Later({Kind.NORM, Kind.NORM_PART}, self._make_norm)
        needs_norm = manifest.knobs.aggregation.needs_norm
        self.engine.use(
            self._rows.service if self.engine.shards else self._rows,
            self._norm.service if needs_norm else self._norm,
        )
        if manifest.wire_dtypes() != [info.dtype for info in manifest.parameters]:
            from foreprop.numerics.wirecasts import WireCasts

            self.engine.memory.casts = WireCasts(manifest, self.engine.slices)

    @property
    def rows(self) -> RowExchange:
        """Of the row-wise parameters."""
        return self._rows.service

    @property
    def norm(self) -> WorkerNorm:
        return self._norm.service

    def _make_rows(self) -> RowExchange:
        from foreprop.tables.exchange import RowExchange

        return RowExchange(self.engine)

    def _make_norm(self) -> WorkerNorm:
        from foreprop.numerics.norms import WorkerNorm

        return WorkerNorm(self.engine)
