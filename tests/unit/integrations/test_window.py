"""What a trainer logs, from two looks at a session's counters."""

from __future__ import annotations

from typing import Any, cast

from foreprop.integrations.window import Share, Window, logged
from foreprop.session.session import Session


class Counting:
    """A session, as far as a window looks."""

    def __init__(self) -> None:
        self.totals: dict[str, Any] = {
            "steps": 0,
            "waited_s": 0.0,
            "pushed_bytes": 0,
            "reply_bytes": 0,
        }

    def stats(self) -> dict[str, Any]:
        return dict(self.totals)


def test_a_window_has_what_happened_since_the_last() -> None:
    session = Counting()
    times = iter([10.0, 14.0, 15.0])
    window = Window(cast(Session, session), now=lambda: next(times))
    session.totals |= {"steps": 2, "waited_s": 1.0, "pushed_bytes": 600, "reply_bytes": 400}
    assert window.close() == Share(1.0, 4.0, 2, 600, 400)
    assert window.close() == Share(0.0, 1.0, 0, 0, 0)


def test_steps_that_nobody_counts_are_none() -> None:
    session = Counting()
    session.totals["steps"] = None
    times = iter([0.0, 2.0])
    assert Window(cast(Session, session), now=lambda: next(times)).close().steps == 0


def share(waited_s: float) -> Share:
    return Share(waited_s, 4.0, 8, 800, 400)


def test_the_straggler_is_the_rank_that_waits_least() -> None:
    found = logged([share(2.0), share(0.4), share(1.0)], own=0)
    assert found["straggler"] == 1
    assert found["waiting_share"] == (0.5 + 0.1 + 0.25) / 3
    assert found["waiting_share_max"] == 0.5
    assert found["steps_per_s"] == 2
    assert found["sent_bytes_per_step"] == 100
    assert found["received_bytes_per_step"] == 50


def test_nobody_is_a_straggler_among_equals_or_alone() -> None:
    assert "straggler" not in logged([share(2.0), share(1.9), share(2.0)], own=1)
    assert "straggler" not in logged([share(0.0)], own=0)


def test_a_window_without_time_divides_by_nothing() -> None:
    assert logged([Share(0.0, 0.0, 0, 0, 0)], own=0)["waiting_share"] == 0
