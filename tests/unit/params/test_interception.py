"""An error that nobody catches is shown as ever, and told by the sessions of its thread."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from foreprop.params.interception import watch_uncaught_errors
from foreprop.session import lifetime


class Recorder:
    """A stand-in for a session."""

    def __init__(self, thread_id: int) -> None:
        self.thread_id = thread_id
        self.told: list[BaseException] = []

    def give_up(self, error: BaseException) -> None:
        self.told.append(error)


def watch(monkeypatch: pytest.MonkeyPatch, *sessions: Recorder) -> None:
    """Watch for uncaught errors, as the first session that is opened does."""
    monkeypatch.setattr(lifetime, "_open", sessions)
    watch_uncaught_errors(lifetime._give_up_here)


def test_in_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *about: shown.append(about))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    mine, another = Recorder(threading.get_ident()), Recorder(-1)
    watch(monkeypatch, mine, another)
    error = ValueError("odd")
    sys.excepthook(ValueError, error, None)
    assert shown == [(ValueError, error, None)]
    assert (mine.told, another.told) == ([error], [])


def test_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", lambda about: shown.append(about.exc_value))
    error = ValueError("odd")

    def fail() -> None:
        trained.thread_id = threading.get_ident()
        raise error

    mine, trained = Recorder(threading.get_ident()), Recorder(-1)
    watch(monkeypatch, mine, trained)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert shown == [error]
    assert (mine.told, trained.told) == ([], [error])


def test_what_shows_errors_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(sys, "excepthook", show)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    mine, error = Recorder(threading.get_ident()), ValueError("odd")
    watch(monkeypatch, mine)
    with pytest.raises(KeyError):
        sys.excepthook(ValueError, error, None)
    assert mine.told == [error]
