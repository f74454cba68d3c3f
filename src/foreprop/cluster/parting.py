"""Sessions that are closed here and not yet on every other rank.

Ranks leave a session together. A process with several would wait in one for a rank that waits in
another; so only the last one that it closes is waited for, and with it all the others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable

from foreprop.errors import ForepropError

_all: weakref.WeakSet[Partings] = weakref.WeakSet()


class Partings:
    """Of one world. What is begun ends by itself within the session's ``step_timeout_s``."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[ForepropError] = []
        _all.add(self)

    def begin(self, part: Callable[[], None]) -> None:
        """Leave a session in a thread of its own."""
        thread = threading.Thread(target=self._run, args=(part,), name="foreprop-part", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, part: Callable[[], None]) -> None:
        try:
            part()
        except ForepropError as error:
            print(f"foreprop: {error}", file=sys.stderr, flush=True)
            self._errors.append(error)

    def wait(self) -> None:
        """Return when all have ended; raises what the first of them had to say."""
        while self._threads:
            self._threads.pop().join()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]


def wait_for_all() -> None:
    """At the process's end; errors have been printed."""
    for partings in list(_all):
        with contextlib.suppress(ForepropError):
            partings.wait()
