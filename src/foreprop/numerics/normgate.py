"""A server's side of the global norm: sums first, then the norm from rank 0, then the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreprop.core.collect import SliceSummed, SumSlice
from foreprop.core.frames import CONTROL_PRIORITY, NormArrived, SendNormPart
from foreprop.core.manifest import Manifest
from foreprop.core.wire import Header, Kind
from foreprop.link.connection import Connection, exactly
from foreprop.numerics.norms import NORM_BYTES, decode_norm
from foreprop.path.executor import Executor, Machine
from foreprop.path.optimizer import scale_of
from foreprop.path.slices import SettingsAt, Updates
from foreprop.path.slicestore import SliceStore


class NormGate:
    """Owns the norm, which lets the updates of its step go."""

    kinds = frozenset({Kind.NORM})

    def __init__(
        self,
        manifest: Manifest,
        machine: Machine,
        executor: Executor,
        store: SliceStore,
        settings_at: SettingsAt,
        updates: Updates,
    ) -> None:
        self.others: list[Callable[[int, float, bool], None]] = []
        """Who else makes updates: told step, coefficient, and whether the step is left out."""
        self._aggregation = manifest.knobs.aggregation
        self._machine = machine
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
        with self._executor.lock:
            instructions = self._machine.handle(NormArrived(peer.number, header.step, skip))
            self._updates.use_coefficient(coefficient)
        if self._executor.host.index == 0:
            for other in range(1, self._executor.peers.count):
                self._executor.answer(other, Kind.NORM, header, bytes(payload))
        for use_norm in self.others:  # rows: look-ups often come first
            use_norm(header.step, coefficient, skip)
        self._executor.execute(instructions)

    def _sum(self, summed: SumSlice) -> Sequence[object]:
        """Do the one sum that is under way; returns what follows from it."""
        with self._executor.lock:
            scale = scale_of(self._settings_at(summed.step))
        part = self._store.aggregate(summed.slice, summed.ranks, scale)
        with self._executor.lock:
            return self._machine.handle(SliceSummed(part))

    def _send_part(self, known: SendNormPart) -> None:
        about = Header(Kind.NORM_PART, 0, 0, known.step, 0, CONTROL_PRIORITY, 0)
        self._executor.answer(0, Kind.NORM_PART, about, known.part.encode())
