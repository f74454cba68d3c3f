"""Says on standard error whom a server waits for: nothing waits in silence."""

from __future__ import annotations

import sys
import time
from typing import Protocol


class Stallable(Protocol):
    @property
    def name(self) -> str:
        """What the server is called."""

    @property
    def stall_report_s(self) -> float:
        """A wait this long is reported."""

    def stalled(self) -> tuple[int, int, str] | None:
        """(slice, step, description) of what some ranks have done and others not; step 0: none."""


class StallReporter:
    """Says on standard error, once per wait, whom this server waits for."""

    def __init__(self, server: Stallable) -> None:
        self._server = server
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._reported = False

    def look(self) -> None:
        stalled = self._server.stalled()
        key = stalled[:2] if stalled else None
        now = time.monotonic()
        if stalled is None or key != self._seen:
            self._seen, self._since, self._reported = key, now, False
        elif not self._reported and now - self._since > self._server.stall_report_s:
            self._reported = True
            where = self._server.name + (f", step {stalled[1]}" if stalled[1] else "")
            text = f"foreprop: {where}: for {now - self._since:.0f} s {stalled[2]}"
            print(text, file=sys.stderr, flush=True)
