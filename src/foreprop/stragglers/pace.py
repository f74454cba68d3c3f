"""A worker's half of naming stragglers: it tells its pace, and concludes from what servers say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from foreprop.config import LOGGER
from foreprop.core.decoding import decoded
from foreprop.core.frames import CONTROL_PRIORITY, PACE_STEPS
from foreprop.core.lateness import Pace, Straggler, StragglerWatch, WindowReport
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, bounded

if TYPE_CHECKING:
    from foreprop.path.worker import WorkerEngine

_LIMIT_BYTES = 2**23
_REPORT = msgspec.json.Decoder(WindowReport)
_FIRST_SERVER = 0
"""Whose report says which order counts: one is enough, for all have the same paces."""


class PaceKeeper:
    """Owns reports. Rank 0 also tells everybody's priorities, when they change for good, and when
    links are to be measured; every rank tells whether its loop asks for the norm of gradients.

    What is told counts from the same step on all ranks: from the end of the window after the one
    in which it was told. So a rank waits there for the first server's report of the window before,
    which usually is long in.
    """

    kinds = frozenset({Kind.PACE_REPORT})

    def __init__(
        self,
        engine: WorkerEngine,
        server_ranks: Sequence[int | None],
        *,
        steps_before: int = 0,
        links: bool = True,
    ) -> None:
        self.order: tuple[int, ...] | None = None
        """To be told with the next pace, by rank 0."""
        self.asks_to_measure = False
        """Likewise: that links are to be measured."""
        self.asks_norm = False
        """To be told with the next pace: this rank has asked for the norm of gradients."""
        self.measures_norm = False
        """All ranks have: servers tell sums of squares, from the same step on for all ranks."""
        self.measure_due = False
        """That has been told; on all ranks from the end of the same window on."""
        self._engine = engine
        self._progress = engine.progress
        self._watch = StragglerWatch(server_ranks, steps_before=steps_before, links=links)
        self._told: dict[int, WindowReport] = {}  # the first server's, by step
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
        """After a window's last step."""
        self._learn(step - PACE_STEPS)
        now_s, blocked_s = time.monotonic(), self._progress.blocked_s
        step_s = busy_s = 0.0  # of the first window: not known
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
        """What all ranks, or rank 0, have told with their paces after ``step``."""
        if step <= 0:
            return
        self._progress.wait_until(
            lambda: step in self._told,
            self._engine.config.step_timeout_s,
            lambda: f"server {_FIRST_SERVER} to say how long all ranks' steps took, step {step}",
        )
        paces = self._told.pop(step).paces
        self.measures_norm = all(pace.norm for pace in paces)
        told = paces[0]
        self.measure_due = self.measure_due or told.measure
        if told.order is not None:
            self._engine.learn_priorities(told.order)

    # Receiving threads.
    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, _LIMIT_BYTES)

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
            if peer.number == _FIRST_SERVER:
                self._told[header.step] = report
        self._progress.notify()
        if changed and self._engine.rank == 0:
            _report_change(before, self._watch.straggler)


def _report_change(before: Straggler | None, now: Straggler | None) -> None:
    if now is not None:
        LOGGER.warning("straggler since step %d: %s", now.since_step, now)
    else:
        LOGGER.info("straggler is gone: %s", before)
