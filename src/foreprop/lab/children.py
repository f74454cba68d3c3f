"""Starting processes without Ctrl-C meeting them while they import."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def children_start_undisturbed() -> Iterator[None]:
    """Ctrl-C waits in a child that is still importing: children inherit what this thread blocks.

    In this process another thread takes the signal, and Python handles it in the main one.
    """
    resource_tracker.ensure_running()  # starting it would unblock the signal again
    ended = threading.Event()
    taker = threading.Thread(target=ended.wait, name="foreprop-signals", daemon=True)
    taker.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ended.set()
        taker.join()
