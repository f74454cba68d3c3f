"""What is left to do when no thread can be started.

Python 3.12 starts none while it shuts down, which is when a session that is still open ends.
"""

from __future__ import annotations

import threading


class DoneThread(threading.Thread):
    """Stands for a thread whose work has been done."""

    def join(self, timeout: float | None = None) -> None:
        del timeout


def done_here(thread: threading.Thread) -> DoneThread:
    """Do the work of a thread that did not start; it must end by itself soon."""
    thread.run()
    return DoneThread(name=thread.name)
