"""A server's updates, and the optimizer's numbers for them, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreprop.core.frames import CONTROL_PRIORITY, SendFrame
from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.norm import encode_square_sums
from foreprop.core.server_machine import SendSquares, SliceUpdated, UpdateSlice
from foreprop.core.wire import Header, Kind
from foreprop.link.connection import Connection
from foreprop.observe.stages import Stage
from foreprop.observe.trace import TraceRecorder
from foreprop.path.executor import Executor, Machine
from foreprop.path.hyperparameters import HyperparameterHistory, decode_groups, with_scale
from foreprop.path.services import bounded
from foreprop.path.slicestore import SliceStore
from foreprop.path.spans import span

HYPERPARAMETERS_LIMIT_BYTES = 1 << 20
_SLICE_UPDATED = SliceUpdated()


class AnnouncedNumbers:
    """Owns the optimizer's numbers, as each peer announces them.

    ``pass_on`` is a relay's: called with what its first worker says.
    """

    kinds = frozenset({Kind.HYPERPARAMETERS})

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        *,
        pass_on: Callable[[Header, memoryview], None] | None = None,
    ) -> None:
        scale = 1.0 if manifest.knobs.aggregation.skip_nonfinite else None
        self._groups = with_scale(manifest.optimizer.groups, scale)
        """What the numbers look like."""
        self._history = HyperparameterHistory([ranks.start for ranks in executor.peers.ranks])
        self._lock = executor.lock
        self._pass_on = pass_on
        self.at = self._history.at
        """What all agree on for a step; raises `ForepropError`. Called with the lock held."""

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, HYPERPARAMETERS_LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        groups = decode_groups(payload, self._groups)
        with self._lock:
            self._history.announce(peer.number, header.step, groups)
        if self._pass_on is not None and peer.number == 0:
            self._pass_on(header, payload)


SettingsAt = Callable[[int], tuple[Hyperparameters, ...]]


class Updates:
    """Makes the update, or the average, that is under way. In whichever thread comes first."""

    def __init__(
        self,
        machine: Machine,
        executor: Executor,
        store: SliceStore,
        settings_at: SettingsAt,
        names: Sequence[str],
    ) -> None:
        self.coefficient = 1.0
        """For the gradients of the step whose updates are under way."""
        self._machine = machine
        self._executor = executor
        self._lock = executor.lock
        self._store = store
        self._settings_at = settings_at
        self._names = names
        self._trace = executor.host.trace
        self._updated_ns: dict[int, int] = {}  # by slice, for the trace
        executor.doers[UpdateSlice] = self._update
        executor.doers[SendSquares] = self._send_squares
        if self._trace is not None:
            executor.on_sent = self._on_sent

    def _update(self, update: UpdateSlice) -> Sequence[object]:
        """Do the one update that is under way; returns what follows from it."""
        started_ns = self._trace.now_ns() if self._trace is not None else 0
        finished = _SLICE_UPDATED
        if update.gradient:
            about = (update.slice, update.ranks)
            squares = self._store.aggregate_only(*about, measure=update.measure)
            finished = SliceUpdated(squares)
        else:
            with self._lock:
                groups = self._settings_at(update.step) if update.ranks else ()
            self._store.update(update.slice, update.ranks, groups, self.coefficient)
        if self._trace is not None:
            self._note_updated(self._trace, update, started_ns)
        with self._lock:
            return self._machine.handle(finished)

    def _send_squares(self, known: SendSquares) -> None:
        about = Header(Kind.NORM_PART, 0, 0, known.step, 0, CONTROL_PRIORITY, 0)
        self._executor.answer_all(Kind.NORM_PART, about, encode_square_sums(known.squares))

    # For the trace.
    def _note_updated(self, trace: TraceRecorder, update: UpdateSlice, started_ns: int) -> None:
        name = self._names[update.slice]
        place = {"step": update.step, "slice_": update.slice}
        trace.span(Stage.UPDATED.value, name, started_ns, **place)
        self._updated_ns[update.slice] = trace.now_ns()

    def _on_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        if self._trace is not None and frame.kind == Kind.REPLY:
            peer, kind, step, slice_, priority, flags, _ = frame
            sent = Header(kind, flags, peer, step, slice_, priority, size_bytes)
            queued_ns = self._updated_ns.get(slice_, started_ns)
            names = self._names
            span(self._trace, Stage.REPLY_QUEUED, names, sent, queued_ns, stop_ns=started_ns)
            span(self._trace, Stage.REPLY_SENT, names, sent, started_ns)
