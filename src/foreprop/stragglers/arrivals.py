"""A server's half of naming stragglers: when pushes arrive, and what workers tell of their pace."""

from __future__ import annotations

import time
from collections import defaultdict

import msgspec

from foreprop.core.decoding import decoded
from foreprop.core.frames import PushArrived
from foreprop.core.lateness import ArrivalLog, Pace
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, bounded
from foreprop.path.executor import Executor
from foreprop.path.slices import Slices, Updates

_LIMIT_BYTES = 2**22
"""Of a pace: with an order of hundreds of thousands of parameters."""
_MOST_WINDOWS = 2
"""Under way at once: nobody begins one before all have told of the one before the last."""
_PACE = msgspec.json.Decoder(Pace)


class ArrivalReports:
    """Owns paces; when all workers have told theirs, all get a report of the window."""

    kinds = frozenset({Kind.PACE})

    def __init__(self, executor: Executor, slices: Slices, updates: Updates) -> None:
        self._executor = executor
        self._log = ArrivalLog(executor.peers.count)
        self._paces: defaultdict[int, dict[int, Pace]] = defaultdict(dict)  # by step and rank
        slices.note_arrivals(self._arrived)
        updates.note_updates(self._updated)

    def _arrived(self, push: PushArrived) -> None:
        self._log.arrived(push.rank, push.slice, push.step, time.monotonic())

    def _updated(self, slice_: int) -> None:
        self._log.updated(slice_, time.monotonic())

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, _LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        pace = decoded(_PACE, payload, "a pace")
        with self._executor.lock:
            told = self._paces[header.step]
            if peer.number in told or len(self._paces) > _MOST_WINDOWS:
                raise RemoteProtocolError(f"a pace of step {header.step}, out of turn")
            told[peer.number] = pace
            if len(told) < self._executor.peers.count:
                return
            del self._paces[header.step]
            report = self._log.report([told[rank] for rank in sorted(told)])
        self._executor.answer_all(Kind.PACE_REPORT, header, msgspec.json.encode(report))
