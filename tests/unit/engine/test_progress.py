"""Waiting for something that another thread does."""

from __future__ import annotations

import re
import threading
import time

import pytest

from foreprop.config import Config
from foreprop.core.frames import CompleteParameter
from foreprop.engine.progress import Progress
from foreprop.errors import PeerLost, StepTimeout

CONFIG = Config(stall_report_s=0.2)


def progress() -> Progress:
    return Progress(["weight", "bias"], rank=3, config=CONFIG)


@pytest.mark.parametrize("with_stall", [False, True])
def test_a_long_wait_does_not_keep_the_processor_busy(with_stall: bool) -> None:
    looks: list[float] = []
    stalls: list[float] = []
    ended_at = time.monotonic() + 1.0

    def condition() -> bool:
        looks.append(time.monotonic())
        return len(stalls) == 5 if with_stall else time.monotonic() >= ended_at

    def on_stall() -> None:
        stalls.append(time.monotonic())

    began = time.monotonic()
    progress().wait_until(condition, 60, lambda: "it", on_stall if with_stall else None)
    assert len(looks) < 20
    for number, at in enumerate(stalls):  # after 0.1 s, then every 0.2 s; later on a busy machine
        assert at - began >= 0.1 + 0.2 * number - 0.01


def test_a_wait_reports_itself_once_and_times_out(capfd: pytest.CaptureFixture[str]) -> None:
    waiting = progress()
    with pytest.raises(StepTimeout, match=r"rank 3 waited \d+\.\d s \(step_timeout_s\) for it"):
        waiting.wait_until(lambda: False, 0.5, lambda: "it")
    assert waiting.error is not None
    told = capfd.readouterr().err
    assert re.fullmatch(r"foreprop: rank 3 for \d s waits for it\n", told)


def test_a_failure_ends_the_wait() -> None:
    waiting = progress()

    def fail() -> None:
        waiting.error = PeerLost("rank 1 is gone")
        waiting.notify()

    threading.Timer(0.05, fail).start()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        waiting.wait_until(lambda: False, 10.0, lambda: "it")


def test_counts_what_was_waited_by_parameter() -> None:
    waiting = progress()
    done: list[int] = []

    def complete() -> None:
        done.append(1)
        waiting.parameter_complete(CompleteParameter(1, 7))

    later = threading.Timer(0.05, complete)

    def is_done() -> bool:
        if later.ident is None:  # once it is waited for
            later.start()
        return bool(done)

    began_s = time.monotonic()
    waiting.wait_for_parameter(1, 7, is_done, lambda: "bias", lambda: None)
    counters = waiting.counters
    assert counters.waits == 1
    assert 0.04 < counters.waited_s <= time.monotonic() - began_s
    assert counters.waited_s_by_parameter == {1: counters.waited_s}
