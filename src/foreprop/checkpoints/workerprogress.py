"""How far this worker has come, said to ``foreprop run``, which starts failed runs again.

It appends lines of a rank and a step to a file in memory of the host's agent; anywhere else there
is no such file, and nobody to be told.
"""

from __future__ import annotations

import contextlib
import os

from foreprop.config.otherhosts import steps_file


def report_step(rank: int, step: int) -> None:
    """A line of up to 40 bytes, which is written whole."""
    path = steps_file()
    if path is None:
        return
    with contextlib.suppress(OSError):  # the agent has gone, and so will this process
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, b"%d %d\n" % (rank, step))
        finally:
            os.close(descriptor)
