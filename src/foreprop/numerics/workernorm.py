"""A worker's side of the global norm: rank 0 adds up the servers' parts, and all ranks learn it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from foreprop.core.barrier import OUTSIDE, NormCombiner
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.norm import ENCODED_BYTES, SquareSum, decode_square_sum
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, bounded
from foreprop.numerics.norms import (
    NORM_BYTES,
    GradientNorms,
    MeasuredGradients,
    decode_norm,
    encode_norm,
)
from foreprop.path.requests import Outside
from foreprop.path.worker import WorkerEngine


class NormOutside(Outside, Protocol):
    """Parameters that no server has, but which have a part in the global norm."""

    def use_norm(self, step: int, norm: float) -> None:
        """The step's global norm is known. Any thread; must not block."""


class WorkerNorm:
    """Owns the norm and its parts, also those of gradients that are only measured."""

    kinds = frozenset({Kind.NORM, Kind.NORM_PART})

    def __init__(self, engine: WorkerEngine) -> None:
        self._engine = engine
        self._aggregation = engine.manifest.knobs.aggregation
        self._progress = engine.progress
        self._norms = GradientNorms(engine.progress, engine.config)
        self._owners = {piece.server for piece in engine.slices if engine.manifest.is_served(piece)}
        self._owners |= {shard.server for shard in engine.shards}
        self._combiner = NormCombiner(self._owners)
        self._squares = MeasuredGradients(engine.slices, parameters=len(engine.parameters))
        self._outside: NormOutside | None = None
        engine.norm_of = self._norms.of

    def room(self, peer: Connection, header: Header) -> memoryview:
        parts_bytes = max(1, len(self._engine.slices)) * ENCODED_BYTES
        return bounded(header, parts_bytes if header.kind == Kind.NORM_PART else NORM_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        kind, step, rank = header.kind, header.step, self._engine.rank
        if kind == Kind.NORM_PART and self._engine.measures:
            self._squares.arrived(peer.number, payload)
            self._progress.notify()
            return
        wanted = Kind.NORM if rank else Kind.NORM_PART
        if kind != wanted or not self._aggregation.needs_norm:
            raise RemoteProtocolError(
                f"server {peer.number} sent rank {rank} {Kind(kind).name}, which is not awaited"
            )
        if kind == Kind.NORM:
            self._use(step, decode_norm(header, payload))
        else:
            self._combine(peer.number, step, decode_square_sum(payload))

    def _combine(self, whose: int, step: int, part: SquareSum) -> None:
        """Rank 0: with the last part the norm is known, and sent to all."""
        with self._engine.lock:
            total = self._combiner.add(whose, step, part)
        if total is not None:
            self._engine.send_to_all(Kind.NORM, step, CONTROL_PRIORITY, encode_norm(total.norm))
            self._use(step, total.norm)

    def _use(self, step: int, norm: float) -> None:
        self._norms.note(step, norm)
        if self._outside is not None:
            self._outside.use_norm(step, norm)

    # If it is also of parameters that no server has.
    def share(self, outside: NormOutside) -> None:
        """Before the first step: wait for their part, too; see `add_part`."""
        self._outside = self._engine.inquiry.outside = outside
        self._combiner = NormCombiner({OUTSIDE, *self._owners})

    def add_part(self, step: int, part: SquareSum) -> None:
        """The outside part of this step is known; it is the same on all ranks. Any thread."""
        if self._engine.rank == 0:
            self._combine(OUTSIDE, step, part)

    # Gradients that are only measured: the workers clip, or look at them.
    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        """By parameter, of the averaged gradients of the session's so-manieth round.

        Blocks until all of them are averaged. Every round must have been measured.
        """
        self._progress.wait_until(
            lambda: self._squares.has(round_),
            self._engine.config.step_timeout_s,
            lambda: f"the norm of the gradients: {self._engine.inquiry.describe_incomplete()}",
            self._engine.inquiry.ask_about_incomplete,
        )
        return self._squares.of(round_)
