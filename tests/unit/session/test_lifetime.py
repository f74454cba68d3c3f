"""What a process does with its open sessions when it ends."""

from __future__ import annotations

import random

import pytest

from foreprop.session import lifetime


class Open:
    """A session's lifetime, as the process's end sees it."""

    def __init__(self, number: int, closed: list[int]) -> None:
        self._number, self._closed = number, closed

    def close(self) -> None:
        self._closed.append(self._number)


def test_sessions_are_closed_in_the_order_in_which_they_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With staleness ranks meet in close(): in other orders they would wait for each other."""
    closed: list[int] = []
    sessions = [Open(number, closed) for number in range(40)]
    random.Random(1).shuffle(sessions)  # so that no order of addresses is theirs
    opened = type(lifetime._open)()
    for session in sessions:
        opened[session] = None  # type: ignore[index]
    monkeypatch.setattr(lifetime, "_open", opened)
    lifetime._close_all()
    assert closed == [session._number for session in sessions]


def test_a_session_may_be_closed_while_the_open_ones_are_looked_at() -> None:
    """Another thread closes it, whose rank ends at the same time."""
    opened = type(lifetime._open)()
    sessions = [Open(number, []) for number in range(3)]
    for session in sessions:
        opened[session] = None  # type: ignore[index]
    found = []
    for session in opened:
        opened.pop(session)
        found.append(session)
    assert found == sessions
    assert not opened
