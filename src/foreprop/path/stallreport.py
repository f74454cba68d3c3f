"""A server's report, while it lasts, of a wait for ranks that have not pushed what others have."""

from __future__ import annotations

import time
from typing import Protocol

from foreprop.config import LOGGER


class MayStall(Protocol):
    """A server, as far as its reporter knows it."""

    name: str

    def stalled(self) -> tuple[int, int, str] | None:
        """(slice, step, description) of what some ranks have pushed and others not."""


class StallReporter:
    """Reports, once per wait, whom this server waits for."""

    def __init__(self, server: MayStall, after_s: float) -> None:
        self._server = server
        self._after_s = after_s
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._reported = False

    def look(self) -> None:
        stalled = self._server.stalled()
        key = stalled[:2] if stalled else None
        now = time.monotonic()
        if stalled is None or key != self._seen:
            self._seen, self._since, self._reported = key, now, False
        elif not self._reported and now - self._since > self._after_s:
            self._reported = True
            where = self._server.name + (f", step {stalled[1]}" if stalled[1] else "")
            LOGGER.warning("%s: for %.0f s %s", where, now - self._since, stalled[2])
