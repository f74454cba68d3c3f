"""How a training goes, in numbers: the difference of its totals between two looks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from foreprop.core.lateness import Straggler
from foreprop.quantities import rate_text, short, time_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """One rank's totals since the start of its session; depths count queued frames."""

    step: int = 0
    waits: int = 0
    waited_s: float = 0.0
    pushed_bytes: int = 0
    reply_bytes: int = 0
    queue_depth: int = 0
    max_queue_depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What one rank did since the last time that it was asked."""

    step: int
    """Steps since the start of the session."""
    steps: int
    """Steps since the last time."""
    seconds: float
    waits: int
    waited_s: float
    """Seconds waited for parameters, or for averaged gradients."""
    pushed_bytes: int
    """Bytes of gradients that have left."""
    reply_bytes: int
    """Bytes that servers have sent back; with a ring 0."""
    queue_depth: int
    """Frames queued at this moment."""
    max_queue_depth: int
    """The most frames queued since the start of the session."""
    straggler: Straggler | None = None
    """The rank that holds up the others, if somebody knows of one."""

    @property
    def step_s(self) -> float:
        """Seconds per step; not a number if there was none."""
        return self.seconds / self.steps if self.steps else math.nan

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds > 0 else math.nan

    @property
    def waiting_share(self) -> float:
        return self.waited_s / self.seconds if self.seconds > 0 else math.nan

    @property
    def sent_bits_per_s(self) -> float:
        return 8 * self.pushed_bytes / self.seconds if self.seconds > 0 else math.nan

    @property
    def received_bits_per_s(self) -> float:
        return 8 * self.reply_bytes / self.seconds if self.seconds > 0 else math.nan

    def scalars(self) -> dict[str, float]:
        """The figures to be drawn over the steps, by name; what is not a number is left out."""
        found = {
            "step_s": self.step_s,
            "steps_per_s": self.steps_per_s,
            "waiting_share": self.waiting_share,
            "sent_bits_per_s": self.sent_bits_per_s,
            "received_bits_per_s": self.received_bits_per_s,
            "queue_depth": float(self.queue_depth),
        }
        if self.straggler is not None:
            rank = self.straggler.rank
            found["straggler_rank"] = math.nan if rank is None else float(rank)
            found["straggler_late_s"] = self.straggler.late_s
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def __str__(self) -> str:
        """One line: step 500: 5.49 steps/s, 182 ms/step, 12% waiting, 1.1 Gbit/s out."""
        if not self.steps:
            return f"step {self.step}: no step in {time_text(self.seconds)}"
        parts = [
            f"{short(self.steps_per_s)} steps/s",
            f"{time_text(self.step_s)}/step",
            f"{100 * self.waiting_share:.0f}% waiting",
        ]
        parts += [f"{rate_text(self.sent_bits_per_s)} out"] * bool(self.pushed_bytes)
        parts += [f"{rate_text(self.received_bits_per_s)} in"] * bool(self.reply_bytes)
        if self.straggler is not None:
            parts.append(f"{self.straggler} since step {self.straggler.since_step}")
        return f"step {self.step}: {', '.join(parts)}"


def no_straggler() -> Straggler | None:
    return None


class Meter:
    """Remembers the totals of the last look. One thread."""

    def __init__(
        self,
        read: Callable[[], Totals],
        straggler: Callable[[], Straggler | None] = no_straggler,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._straggler, self._clock = read, straggler, clock
        self._last, self._last_s = read(), clock()

    def since_last(self) -> Metrics:
        """What was done since the last call, or since the meter was made."""
        now, now_s = self._read(), self._clock()
        last, last_s = self._last, self._last_s
        self._last, self._last_s = now, now_s
        return Metrics(
            step=now.step,
            steps=now.step - last.step,
            seconds=now_s - last_s,
            waits=_growth(now.waits, last.waits),
            waited_s=_growth(now.waited_s, last.waited_s),
            pushed_bytes=_growth(now.pushed_bytes, last.pushed_bytes),
            reply_bytes=_growth(now.reply_bytes, last.reply_bytes),
            queue_depth=now.queue_depth,
            max_queue_depth=now.max_queue_depth,
            straggler=self._straggler(),
        )


_Number = TypeVar("_Number", int, float)


def _growth(now: _Number, last: _Number) -> _Number:
    """The growth of a total, which begins anew where a session connects anew."""
    return now - last if now >= last else now
