"""An error that nobody catches is told to the other ranks at once.

The process may stay for long after it, for other threads that are not daemons: the interpreter
waits for those before it calls what is registered with `atexit`.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Collection
from typing import Protocol


class GivesUp(Protocol):
    """A session, as far as it is needed here."""

    @property
    def thread_id(self) -> int:
        """The training thread."""

    def give_up(self, error: BaseException) -> None: ...


def watch_uncaught_errors(sessions: Collection[GivesUp]) -> None:
    """Once per process. What was there to show such errors is called as before, first."""
    show, show_in_thread = sys.excepthook, threading.excepthook

    def give_up(error: BaseException | None) -> None:
        for session in list(sessions):
            if error is not None and session.thread_id == threading.get_ident():
                session.give_up(error)

    def on_error(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        try:
            show(kind, error, trace)
        finally:
            give_up(error)

    def on_error_in_thread(about: threading.ExceptHookArgs) -> None:
        try:
            show_in_thread(about)
        finally:
            give_up(about.exc_value)

    sys.excepthook, threading.excepthook = on_error, on_error_in_thread
