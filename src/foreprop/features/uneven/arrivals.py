"""A server's half of naming stragglers: when pushes arrive, and the pace that workers report.

Workers send their pace once per window of steps. When all have, each gets a report of the window.
"""

from __future__ import annotations

import time
from collections import defaultdict

import msgspec

from foreprop.core.lateness import ArrivalLog, Pace, windows_apart
from foreprop.core.wire import Header, Kind, decoded
from foreprop.engine.connection import BoundedService, Connection
from foreprop.engine.executor import Executor
from foreprop.engine.slices import Slices, Updates
from foreprop.errors import RemoteProtocolError

_LIMIT_BYTES = 2**22
"""The most bytes of a pace: with an order of hundreds of thousands of parameters."""
_PACE = msgspec.json.Decoder(Pace)


class ArrivalReports(BoundedService):
    """Collects the workers' paces; they may be ``steps_apart`` steps apart."""

    kinds = frozenset({Kind.PACE})
    limit_bytes = _LIMIT_BYTES

    def __init__(
        self, executor: Executor, slices: Slices, updates: Updates, steps_apart: int = 0
    ) -> None:
        self._executor = executor
        self._log = ArrivalLog(executor.peers.count, steps_apart)
        # a worker that is ahead waits for a report before it opens more windows (`uneven.pace`)
        self._most_windows = 1 + windows_apart(steps_apart)
        self._paces: defaultdict[int, dict[int, Pace]] = defaultdict(dict)  # by step and rank
        self._slices = slices
        slices.note_arrivals(self._log)
        updates.note_updates(lambda slice_: self._log.updated(slice_, time.monotonic()))

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        pace = decoded(_PACE, payload, "a pace")
        with self._executor.lock:
            paces = self._paces[header.step]
            if peer.number in paces or len(self._paces) > self._most_windows:
                raise RemoteProtocolError(f"a pace of step {header.step}, out of turn")
            paces[peer.number] = pace
            if len(paces) < self._executor.peers.count:
                return
            del self._paces[header.step]
            self._slices.catch_up()
            report = self._log.report([paces[rank] for rank in sorted(paces)])
        self._executor.answer_all(Kind.PACE_REPORT, header, msgspec.json.encode(report))
