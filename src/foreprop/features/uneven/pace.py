"""A worker's half of naming stragglers: it reports its pace, and concludes from servers' reports.

Every rank also reports whether its loop asks for the norm of gradients. Rank 0 adds priorities
that have changed for good, and whether links are to be measured. All of this counts from the same
step on every rank: from the end of the window after the one in which it was reported. So a rank
waits there for all servers' reports of the window before, which usually are long in. Nor does a
server hear of one more window than that: one without slices hears from ranks far apart. Where ranks
may be steps apart it counts as many windows later.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from foreprop.config import LOGGER
from foreprop.core.frames import CONTROL_PRIORITY, PACE_STEPS
from foreprop.core.lateness import Pace, Straggler, StragglerWatch, WindowReport, windows_apart
from foreprop.core.wire import Header, Kind, decoded
from foreprop.engine.connection import BoundedService, Connection
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import RemoteProtocolError

_LIMIT_BYTES = 2**23
_REPORT = msgspec.json.Decoder(WindowReport)
_FIRST_SERVER = 0  # its report says which order counts: all servers have the same paces


class PaceKeeper(BoundedService):
    """Sends this rank's pace after each window, and keeps what the servers reported of all."""

    kinds = frozenset({Kind.PACE_REPORT})
    limit_bytes = _LIMIT_BYTES

    def __init__(
        self,
        engine: WorkerEngine,
        server_ranks: Sequence[int | None],
        *,
        steps_before: int = 0,
        links: bool = True,
    ) -> None:
        # What the next pace says: rank 0's new order, that links are to be measured, and whether
        # this rank has asked for the norm of gradients.
        self.order: tuple[int, ...] | None = None
        self.asks_to_measure = False
        self.asks_norm = False
        # whether all ranks have asked for the norm: then servers send sums of squares
        self.measures_norm = False
        self.measure_due = False  # whether rank 0 has said that links are to be measured
        self._engine = engine
        self._progress = engine.progress
        self._lag_steps = PACE_STEPS * windows_apart(engine.manifest.knobs.steps_apart)
        self._watch = StragglerWatch(server_ranks, steps_before=steps_before, links=links)
        self._servers = len(server_ranks)
        # by step and server
        self._reports: defaultdict[int, dict[int, WindowReport]] = defaultdict(dict)
        self._ended_s: float | None = None
        self._blocked_s = 0.0

    @property
    def straggler(self) -> Straggler | None:
        return self._watch.straggler

    @property
    def suspect(self) -> Straggler | None:
        """Who may be worth a measurement of links."""
        return self._watch.suspect

    # Training thread.
    def end_window(self, step: int) -> None:
        """Send the pace after a window's last step, and follow what is due by now."""
        self._learn(step - self._lag_steps)
        now_s, blocked_s = time.monotonic(), self._progress.blocked_s
        step_s = busy_s = 0.0  # unknown in the first window
        if self._ended_s is not None:
            step_s = (now_s - self._ended_s) / PACE_STEPS
            busy_s = step_s - (blocked_s - self._blocked_s) / PACE_STEPS
        self._ended_s, self._blocked_s = now_s, blocked_s
        pace = Pace(
            step_s=step_s,
            busy_s=busy_s,
            order=self.order,
            measure=self.asks_to_measure,
            norm=self.asks_norm,
        )
        self.order, self.asks_to_measure, self.asks_norm = None, False, False
        self._engine.send_to_all(Kind.PACE, step, CONTROL_PRIORITY, msgspec.json.encode(pace))

    def _learn(self, step: int) -> None:
        """Follow what all ranks, or rank 0, have said with their paces after ``step``."""
        if step <= 0:
            return
        with self._engine.lock:
            reports = self._reports[step]
        self._progress.wait_until(
            lambda: len(reports) == self._servers,
            self._engine.config.step_timeout_s,
            lambda: (
                f"servers to say how long all ranks' steps took, step {step}: of"
                f" {self._servers}, {sorted(reports)} have"
            ),
        )
        paces = self._reports.pop(step)[_FIRST_SERVER].paces
        self.measures_norm = all(pace.norm for pace in paces)
        self.measure_due = self.measure_due or paces[0].measure
        if (order := paces[0].order) is not None:
            self._engine.learn_priorities(order)

    # Receiving threads.
    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        report = decoded(_REPORT, payload, "a report of paces")
        if not len(report.late_s) == len(report.paces) == self._engine.manifest.world_size:
            raise RemoteProtocolError(f"a report of {len(report.paces)} paces")
        if not 0 < header.step <= self._engine.steps or header.step % PACE_STEPS:
            raise RemoteProtocolError(
                f"a report of step {header.step}, after {self._engine.steps} steps"
            )
        order, count = report.paces[0].order, len(self._engine.parameters)
        if order is not None and sorted(order) != list(range(count)):
            raise RemoteProtocolError(f"rank 0's order of {count} parameters is {str(order)[:80]}")
        with self._engine.lock:
            before = self._watch.straggler
            changed = self._watch.heard(peer.number, header.step // PACE_STEPS, report)
            self._reports[header.step][peer.number] = report
        self._progress.notify()
        if changed and self._engine.rank == 0:
            if (now := self._watch.straggler) is not None:
                LOGGER.warning("straggler since step %d: %s", now.since_step, now)
            else:
                LOGGER.info("straggler is gone: %s", before)
