"""A server's side of the global norm: sums first, then the norm from a worker, then updates.

The server adds up each slice and sends its part of the sum of squares to whoever adds those up (see
`params.norms`). The norm that comes back lets the updates of its step go. Server 0 passes on what
rank 0 says to the other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from foreprop.core.barrier import StepBarrier
from foreprop.core.collect import SliceSummed, SumSlice
from foreprop.core.frames import CONTROL_PRIORITY, NormArrived
from foreprop.core.manifest import Manifest
from foreprop.core.norm import SendNormPart
from foreprop.core.wire import Header, Kind
from foreprop.engine.connection import Connection, exactly
from foreprop.engine.executor import Executor
from foreprop.engine.optimizer import scale_of
from foreprop.engine.slices import SettingsAt, Updates
from foreprop.engine.slicestore import SliceStore
from foreprop.params.norms import NORM_BYTES, decode_norm


class NormGate:
    """The service that owns the norm's frames.

    ``adding`` says who adds up the servers' parts at the moment; None: who each part is for.
    """

    kinds = frozenset({Kind.NORM})

    def __init__(
        self,
        manifest: Manifest,
        barrier: StepBarrier | None,
        adding: Callable[[], Iterable[int]] | None,
        executor: Executor,
        store: SliceStore,
        settings_at: SettingsAt,
        updates: Updates,
    ) -> None:
        self._aggregation = manifest.knobs.aggregation
        self._barrier = barrier
        self._adding = adding
        self._by_itself = barrier is not None and barrier.told_by == "own"
        self._executor = executor
        self._store = store
        self._settings_at = settings_at
        self._updates = updates
        executor.doers[SumSlice] = self._sum
        executor.doers[SendNormPart] = self._send_part

    def room(self, peer: Connection, header: Header) -> memoryview:
        return exactly(header, NORM_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        norm = decode_norm(header, payload)
        skip, coefficient = self._aggregation.skips(norm), self._aggregation.coefficient(norm)
        told_by = "rank 0" if self._barrier is None else self._barrier.told_by
        with self._executor.lock:
            if self._barrier is not None and self._barrier.has_been_told(header.step):
                return
            instructions = self._executor.handle(NormArrived(peer.number, header.step, skip))
            self._updates.coefficient = coefficient
        if self._executor.host.index == 0 and told_by == "rank 0":
            for other in range(1, self._executor.peers.count):
                self._executor.answer(other, Kind.NORM, header, bytes(payload))
        self._executor.execute(instructions)

    def _sum(self, summed: SumSlice) -> Sequence[object]:
        with self._executor.lock:
            scale = scale_of(self._settings_at(summed.step, summed.ranks))
        make = self._store.measure if self._by_itself else self._store.aggregate
        part = make(summed.slice, summed.ranks, scale, summed.counted)
        with self._executor.lock:
            return self._executor.handle(SliceSummed(part))

    def _send_part(self, known: SendNormPart) -> None:
        about = Header(Kind.NORM_PART, 0, 0, known.step, 0, CONTROL_PRIORITY, 0)
        with self._executor.lock:
            adding = [known.rank] if self._adding is None else list(self._adding())
        for rank in adding:
            self._executor.answer(rank, Kind.NORM_PART, about, known.part.encode())
