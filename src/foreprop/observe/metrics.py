"""How a training goes, in numbers: from totals since the start to what was since the last look."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from foreprop.quantities import rate_text, short, time_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of one rank, since the start of its session; depths are of frames that are queued."""

    step: int = 0
    waits: int = 0
    waited_s: float = 0.0
    pushed_bytes: int = 0
    reply_bytes: int = 0
    queue_depth: int = 0
    max_queue_depth: int = 0


class HoldUp(Protocol):
    """What holds up the others, in words as a text."""

    @property
    def rank(self) -> int | None:
        """None: it is no rank."""

    @property
    def late_s(self) -> float:
        """Behind the others, in each step."""

    @property
    def since_step(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What one rank did since the last time that it was asked."""

    step: int
    """Steps since the start of the session."""
    steps: int
    """In this time."""
    seconds: float
    waits: int
    waited_s: float
    """For parameters, or for averaged gradients."""
    pushed_bytes: int
    """Gradients that have left."""
    reply_bytes: int
    """What servers have sent back; with a ring 0."""
    queue_depth: int
    """Frames queued at this moment."""
    max_queue_depth: int
    """The most since the start of the session."""
    straggler: HoldUp | None = None
    """If somebody knows that one rank holds up the others."""

    @property
    def step_s(self) -> float:
        """Seconds per step; not a number if there was none."""
        return self.seconds / self.steps if self.steps else math.nan

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds > 0 else math.nan

    @property
    def waiting_share(self) -> float:
        """Of the time, 0 to 1."""
        return self.waited_s / self.seconds if self.seconds > 0 else math.nan

    @property
    def sent_bits_per_s(self) -> float:
        return 8 * self.pushed_bytes / self.seconds if self.seconds > 0 else math.nan

    @property
    def received_bits_per_s(self) -> float:
        return 8 * self.reply_bytes / self.seconds if self.seconds > 0 else math.nan

    def scalars(self) -> dict[str, float]:
        """By name, what can be drawn over the steps; without what is not a number."""
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


def no_straggler() -> HoldUp | None:
    """Nobody knows of one."""
    return None


class Meter:
    """Remembers what was at the last look. One thread."""

    def __init__(
        self,
        read: Callable[[], Totals],
        straggler: Callable[[], HoldUp | None] = no_straggler,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._straggler, self._clock = read, straggler, clock
        self._last, self._last_s = read(), clock()

    def since_last(self) -> Metrics:
        """Since the last call, or since the meter was made."""
        now, now_s = self._read(), self._clock()
        last, last_s = self._last, self._last_s
        self._last, self._last_s = now, now_s
        return Metrics(
            step=now.step,
            steps=now.step - last.step,
            seconds=now_s - last_s,
            waits=_more(now.waits, last.waits),
            waited_s=_more(now.waited_s, last.waited_s),
            pushed_bytes=_more(now.pushed_bytes, last.pushed_bytes),
            reply_bytes=_more(now.reply_bytes, last.reply_bytes),
            queue_depth=now.queue_depth,
            max_queue_depth=now.max_queue_depth,
            straggler=self._straggler(),
        )


_Number = TypeVar("_Number", int, float)


def _more(now: _Number, last: _Number) -> _Number:
    """Who connects anew, as a plan may want it, counts anew."""
    return now - last if now >= last else now
