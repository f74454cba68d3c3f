"""What a session did between two lines of a trainer's log, from two `Session.stats`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from foreprop.session.session import Session

LAGS = 0.05
"""A rank that waits by this share of the time less than the others is the one they wait for."""


class Share(NamedTuple):
    """One rank's seconds waited, of so many in all, its steps, and its bytes."""

    waited_s: float
    elapsed_s: float
    steps: float
    sent_bytes: float
    received_bytes: float

    @property
    def waiting(self) -> float:
        return min(1.0, self.waited_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0


class Window:
    """Measures what a session does between two calls of `close`. Training thread."""

    def __init__(self, session: Session, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._session = session
        self._now = now
        self._before = self._read()

    def _read(self) -> Share:
        stats = self._session.stats()
        return Share(
            stats["waited_s"],
            self._now(),
            stats["steps"] or 0,
            stats["pushed_bytes"],
            stats["reply_bytes"],
        )

    def close(self) -> Share:
        before, self._before = self._before, self._read()
        return Share(*(now - then for now, then in zip(self._before, before, strict=True)))


def logged(shares: Sequence[Share], own: int) -> dict[str, float]:
    """The figures to be logged, from all ranks' shares; bytes are those of rank ``own``, per step.

    ``straggler`` is the rank that the others wait for; it is there only if one clearly waits less.
    """
    waiting = [share.waiting for share in shares]
    mine, least = shares[own], waiting.index(min(waiting))
    steps = max(1.0, mine.steps)
    found = {
        "steps_per_s": mine.steps / mine.elapsed_s if mine.elapsed_s > 0 else 0.0,
        "waiting_share": sum(waiting) / len(waiting),
        "waiting_share_max": max(waiting),
        "sent_bytes_per_step": mine.sent_bytes / steps,
        "received_bytes_per_step": mine.received_bytes / steps,
    }
    others = [share for rank, share in enumerate(waiting) if rank != least]
    if others and min(others) - waiting[least] > LAGS:
        found["straggler"] = float(least)
    return found
