"""How long nothing has been heard of a peer, and what is to be done about that."""

from __future__ import annotations

from typing import Literal

Verdict = Literal["", "told", "again", "lost"]
"""Nothing, or: tell that it is silent; tell that it is heard again; go on without it."""

LOOK_S = 1.0
"""No look counts for more: who looks too late, because it was stopped itself, has seen nothing."""


class Silence:
    """Of one peer, from the first look on. Not thread-safe."""

    def __init__(self, report_s: float, timeout_s: float) -> None:
        self.silent_s = 0.0
        self._report_s = report_s
        self._timeout_s = timeout_s
        self._looked_at_s: float | None = None
        self._told = False

    def look(self, now_s: float, *, heard: bool) -> Verdict:
        """``heard``: something has come since the last look."""
        before_s, self._looked_at_s = self._looked_at_s, now_s
        if heard:
            told, self._told, self.silent_s = self._told, False, 0.0
            return "again" if told else ""
        if before_s is not None:
            self.silent_s += min(now_s - before_s, LOOK_S)
        if self.silent_s >= self._timeout_s:
            return "lost"
        if self.silent_s >= self._report_s and not self._told:
            self._told = True
            return "told"
        return ""
