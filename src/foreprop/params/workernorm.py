"""The global norm on a worker: rank 0 adds up the servers' parts, and all ranks learn it.

Where rank 0 may be late or lost, or a push is an update by itself, each worker adds them up: see
`core.barrier`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from foreprop.core.barrier import OUTSIDE, NormCombiner
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.norm import ENCODED_BYTES, SquareSum, decode_square_sum
from foreprop.core.wire import Header, Kind
from foreprop.engine.connection import Connection, bounded
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import RemoteProtocolError
from foreprop.params.norms import (
    NORM_BYTES,
    GradientNorms,
    MeasuredGradients,
    decode_norm,
    encode_norm,
)


class WorkerNorm:
    """The service that owns the frames of the norm and of its parts."""

    kinds = frozenset({Kind.NORM, Kind.NORM_PART})

    def __init__(self, engine: WorkerEngine) -> None:
        self._engine = engine
        self._aggregation = engine.manifest.knobs.aggregation
        self._progress = engine.progress
        knobs = engine.manifest.knobs
        counts_some = knobs.counts_some
        self._adds_up = engine.rank == 0 or counts_some or bool(knobs.staleness)
        made = (lambda: engine.steps) if counts_some else None
        self._norms = GradientNorms(engine.progress, engine.config, made)
        self._owners = {piece.server for piece in engine.slices if engine.manifest.is_served(piece)}
        self._owners |= {shard.server for shard in engine.shards}
        self._combiner = NormCombiner(self._owners, from_all=counts_some)
        self._squares = MeasuredGradients(
            engine.slices, engine.manifest.knobs.packs, parameters=len(engine.parameters)
        )
        self._use_outside: Callable[[int, float], None] | None = None
        self.of = self._norms.of

    def room(self, peer: Connection, header: Header) -> memoryview:
        most = len(self._engine.slices) + len(self._engine.parameters)  # in packs there are more
        parts_bytes = max(1, most) * ENCODED_BYTES
        return bounded(header, parts_bytes if header.kind == Kind.NORM_PART else NORM_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        kind, step, rank = header.kind, header.step, self._engine.rank
        if kind == Kind.NORM_PART and self._engine.measures:
            self._squares.arrived(peer.number, payload)
            self._progress.notify()
            return
        wanted = Kind.NORM_PART if self._adds_up else Kind.NORM
        if kind != wanted or not self._aggregation.needs_norm:
            raise RemoteProtocolError(
                f"server {peer.number} sent rank {rank} {Kind(kind).name}, which is not awaited"
            )
        if kind == Kind.NORM:
            self._use(step, decode_norm(header, payload))
        else:
            self._combine(peer.number, step, decode_square_sum(payload))

    def _combine(self, whose: int, step: int, part: SquareSum) -> None:
        # with the last part the norm is known, and sent to all
        with self._engine.lock:
            total = self._combiner.add(whose, step, part)
        if total is not None:
            self._engine.send_to_all(Kind.NORM, step, CONTROL_PRIORITY, encode_norm(total.norm))
            self._use(step, total.norm)

    def _use(self, step: int, norm: float) -> None:
        self._norms.note(step, norm)
        if self._use_outside is not None:
            self._use_outside(step, norm)

    def share(self, use_norm: Callable[[int, float], None]) -> None:
        """Wait also for the part of parameters that no server has, see `add_part`.

        To be called before the first step. ``use_norm`` is called with each step and its norm, by
        any thread, and must not block.
        """
        self._use_outside = use_norm
        self._combiner = NormCombiner({OUTSIDE, *self._owners})

    def add_part(self, step: int, part: SquareSum) -> None:
        """Add the part that no server has, which is the same on all ranks. Any thread."""
        if self._engine.rank == 0:
            self._combine(OUTSIDE, step, part)

    def square_sums(self, round_: int, step: int) -> Sequence[SquareSum]:
        """Each parameter's sum of squares of the averaged gradient, in a measured round.

        Blocks until all are averaged, which counts as waited in ``step``.
        """
        if not self._squares.has(round_):
            started_ns = time.perf_counter_ns()
            self._progress.wait_until(
                lambda: self._squares.has(round_),
                self._engine.config.step_timeout_s,
                lambda: f"the norm of the gradients: {self._engine.requests.describe_incomplete()}",
                self._engine.requests.ask_about_incomplete,
            )
            self._progress.count_wait("norm of the gradients", started_ns, step)
        return self._squares.of(round_)
