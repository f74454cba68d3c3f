"""The global norm on a worker: rank 0 adds up the servers' parts, and all ranks learn it."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foreprop.config import Config
from foreprop.core.barrier import OUTSIDE, NormCombiner
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.norm import (
    ENCODED_BYTES,
    ZERO,
    SquareSum,
    decode_square_sum,
    decode_square_sums,
)
from foreprop.core.packs import Packs
from foreprop.core.slicing import Slice
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, bounded
from foreprop.path.progress import Progress

if TYPE_CHECKING:  # servers and collectives need the norm, too
    from foreprop.path.requests import Outside
    from foreprop.path.worker import WorkerEngine

_LAYOUT = struct.Struct("!d")
_KEPT_STEPS = 3
NORM_BYTES = _LAYOUT.size


def decode_norm(header: Header, payload: bytes | memoryview) -> float:
    """Raises `RemoteProtocolError` for anything that is not the norm of some gradients."""
    if len(payload) != NORM_BYTES:
        raise RemoteProtocolError(f"a norm has {NORM_BYTES} bytes, got {len(payload)}")
    (norm,) = _LAYOUT.unpack(payload)
    if norm < 0:
        raise RemoteProtocolError(f"the norm of step {header.step} is {norm}")
    return float(norm)


class GradientNorms:
    """Noted by any thread, waited for by the training thread."""

    def __init__(self, progress: Progress, config: Config) -> None:
        self._progress = progress
        self._config = config
        self._by_step: dict[int, float] = {}

    def note(self, step: int, norm: float) -> None:
        kept = {s: n for s, n in self._by_step.items() if s > step - _KEPT_STEPS}
        self._by_step = {**kept, step: norm}
        self._progress.notify()

    def of(self, step: int) -> float:
        """Block until the step's norm is known; raises what went wrong meanwhile."""
        self._progress.wait_until(
            lambda: step in self._by_step,
            self._config.step_timeout_s,
            lambda: f"the gradient norm of step {step}",
        )
        return self._by_step[step]


class MeasuredGradients:
    """What the servers tell of averaged gradients, round by round, each of its own slices.

    Noted by the receiving threads, one for each server; asked by the training thread.
    """

    def __init__(self, slices: Sequence[Slice], packs: Packs, *, parameters: int) -> None:
        self._measured: dict[int, list[int]] = {}  # by server: which parameters it tells of
        pack_of = {pack[0]: pack for pack in packs}
        for piece in slices:
            numbers = pack_of.get(piece.parameter, (piece.parameter,))
            self._measured.setdefault(piece.server, []).extend(numbers)
        self._parameters = parameters
        self._told: dict[int, list[list[SquareSum]]] = {server: [] for server in self._measured}
        self._first_round = dict.fromkeys(self._measured, 1)  # of those that are kept
        self._known: tuple[int, list[SquareSum]] = (0, [])

    def arrived(self, server: int, payload: bytes | memoryview) -> None:
        """Raises `RemoteProtocolError` for anything that cannot be a round's."""
        numbers = self._measured.get(server)
        if numbers is None:
            raise RemoteProtocolError(f"server {server} has no slices to measure")
        self._told[server].append(decode_square_sums(payload, count=len(numbers)))

    def has(self, round_: int) -> bool:
        return all(
            self._first_round[server] + len(told) > round_ for server, told in self._told.items()
        )

    def of(self, round_: int) -> Sequence[SquareSum]:
        """By parameter; earlier rounds are forgotten."""
        if self._known[0] != round_:
            sums = [ZERO] * self._parameters
            for server, numbers in self._measured.items():
                told = self._told[server]
                del told[: round_ - self._first_round[server]]
                self._first_round[server] = round_
                for number, part in zip(numbers, told[0], strict=True):
                    sums[number] = sums[number].plus(part)
            self._known = (round_, sums)
        return self._known[1]


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
            self._engine.send_to_all(Kind.NORM, step, CONTROL_PRIORITY, _LAYOUT.pack(total.norm))
            self._use(step, total.norm)

    def _use(self, step: int, norm: float) -> None:
        self._norms.note(step, norm)
        if self._use_outside is not None:
            self._use_outside(step, norm)

    # If it is also of parameters that no server has.
    def share(self, outside: Outside, use_norm: Callable[[int, float], None]) -> None:
        """Before the first step: wait for their part, too; see `add_part`.

        ``use_norm`` is told each step's global norm, by any thread, and must not block.
        """
        self._engine.inquiry.outside, self._use_outside = outside, use_norm
        self._combiner = NormCombiner({OUTSIDE, *self._owners})

    def add_part(self, step: int, part: SquareSum) -> None:
        """The outside part of this step is known; it is the same on all ranks. Any thread."""
        if self._engine.rank == 0:
            self._combine(OUTSIDE, step, part)

    def _wait_for_squares(self, round_: int, step: int) -> None:
        started_ns = time.perf_counter_ns()
        self._progress.wait_until(
            lambda: self._squares.has(round_),
            self._engine.config.step_timeout_s,
            lambda: f"the norm of the gradients: {self._engine.inquiry.describe_incomplete()}",
            self._engine.inquiry.ask_about_incomplete,
        )
        self._progress.count_wait("norm of the gradients", started_ns, step)

    # Gradients that are only measured: the workers clip, or look at them.
    def square_sums(self, round_: int, step: int) -> Sequence[SquareSum]:
        """By parameter, of the averaged gradients of the so-manieth round that is measured.

        Blocks until all of them are averaged, which counts as waited in ``step``.
        """
        if not self._squares.has(round_):
            self._wait_for_squares(round_, step)
        return self._squares.of(round_)
