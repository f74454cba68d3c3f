"""What threads wait on: something has changed, or something has failed.

Nothing waits in silence: ranks and servers report what they wait for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreprop.config import LOGGER, Config
from foreprop.core.frames import CompleteParameter, Stage
from foreprop.errors import ForepropError, PeerLost, StepTimeout

NOTHING = -1


@dataclass(slots=True)
class Counters:
    """Totals since the start, for `Session.stats`."""

    pushes: int = 0
    pushed_bytes: int = 0
    replies: int = 0
    reply_bytes: int = 0
    max_queue_depth: int = 0
    waits: int = 0
    waited_s: float = 0.0
    waited_s_by_parameter: dict[int, float] = field(default_factory=dict)


class Progress:
    """Waits for parameters and other events, reports stalls, and counts what was waited.

    The first error is kept in ``error`` and raised in whoever waits.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rank: int,
        config: Config,
        span: Callable[..., None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """``look`` is called now and then by who waits for a parameter, and may raise.

        ``span`` is `TraceRecorder.span`, of a session that records.
        """
        self.counters = Counters()
        self.error: ForepropError | None = None
        self.failed = False
        """Whether this has an error, or a progress that is beside it."""
        self.beside: list[Progress] = []
        """The progress of engines in the same session, whose failure is this one's too."""
        self.blocked_s = 0.0
        self.awaited = NOTHING
        """The parameter that a thread waits for."""
        self._names = names
        self._rank = rank
        self._config = config
        self._span = span
        self._look = look
        self.wakes: Callable[[], None] = lambda: None
        """Wakes who waits elsewhere: see ``sleep`` of `wait_until`."""
        self._changed = threading.Condition()
        self._waiters = 0

    def keep(self, error: ForepropError) -> None:
        """Have an error raised in whoever waits; the first one stays."""
        if self.error is None:
            self.error = error
            if isinstance(error, PeerLost):
                from foreprop.config.launchers import report_lost

                report_lost(self._rank, error.peer)
        for progress in (self, *self.beside):
            progress.failed = True

    def raise_if_failed(self) -> None:
        for progress in (self, *self.beside):
            if progress.error is not None:
                raise progress.error

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self.wakes()

    def gradient_ready(self, parameter: int, step: int) -> None:
        if self._span is not None:
            self._mark(self._span, Stage.GRADIENT_READY, parameter, step)

    def parameter_complete(self, complete: CompleteParameter) -> None:
        """Wake whoever waits for the parameter, and note it in the trace."""
        parameter, step = complete
        if self._waiters > 1 or parameter == self.awaited:
            self.notify()
        if self._span is not None:
            self._mark(self._span, Stage.PARAMETER_READY, parameter, step)

    def _mark(self, span: Callable[..., None], stage: Stage, parameter: int, step: int) -> None:
        now_ns = time.perf_counter_ns()
        span(stage.value, self._names[parameter], now_ns, stop_ns=now_ns, step=step)

    def wait_for_parameter(
        self,
        parameter: int,
        step: int,
        condition: Callable[[], bool],
        describe: Callable[[], str],
        on_stall: Callable[[], None],
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """Block until a parameter's result of ``step`` is in."""
        started_ns = time.perf_counter_ns()
        self.awaited = parameter  # before the condition is looked at

        def stalled() -> None:
            on_stall()
            if self._look is not None:
                self._look()

        limit_s = self._config.step_timeout_s
        self.wait_until(condition, limit_s, describe, stalled, sleep=sleep)
        self.awaited = NOTHING
        waited, name = self.counters.waited_s_by_parameter, self._names[parameter]
        waited[parameter] = waited.get(parameter, 0.0) + self.count_wait(name, started_ns, step + 1)

    def count_wait(self, what: str, started_ns: int, step: int) -> float:
        """Count a wait in the totals and the trace; returns its seconds."""
        waited_s = (time.perf_counter_ns() - started_ns) / 1e9
        self.counters.waits += 1
        self.counters.waited_s += waited_s
        if self._span is not None:
            self._span("wait", what, started_ns, step=step)
        return waited_s

    def wait_until(
        self,
        condition: Callable[[], bool],
        timeout_s: float,
        describe: Callable[[], str],
        on_stall: Callable[[], None] | None = None,
        setting: str = "step_timeout_s",
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """Block until the condition holds; reports a stall, raises failure or `StepTimeout`.

        ``sleep`` ends after so many seconds, or when the condition may hold; by default that is
        when somebody notifies.
        """
        started = time.monotonic()
        report_at = started + self._config.stall_report_s
        ask_at = float("inf")
        if on_stall is not None:
            ask_at = started + min(self._config.stall_report_s, timeout_s) / 2
        guard = self._changed if sleep is None else contextlib.nullcontext()
        with guard:
            self._waiters += 1
            try:
                while not condition():
                    self.raise_if_failed()
                    now = time.monotonic()
                    if now >= started + timeout_s:
                        waited_s, what = now - started, describe()
                        self.error = StepTimeout(
                            f"rank {self._rank} waited {waited_s:.1f} s ({setting}) for {what}"
                        )
                        raise self.error
                    if on_stall is not None and now >= ask_at:
                        ask_at = now + self._config.stall_report_s
                        on_stall()
                    if now >= report_at:
                        report_at = float("inf")
                        self.report(f"for {now - started:.0f} s waits for {describe()}")
                    next_look = min(report_at, ask_at, started + timeout_s)
                    most_s = max(0.0, min(next_look - now, 1.0))
                    self._changed.wait(most_s) if sleep is None else sleep(most_s)
            finally:
                self._waiters -= 1
                self.blocked_s += time.monotonic() - started

    def report(self, text: str) -> None:
        LOGGER.warning("rank %d %s", self._rank, text)
