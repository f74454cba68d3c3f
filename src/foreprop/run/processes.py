"""Linux's ways of leaving no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parents end before them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Those that run: what has ended and waits to be collected is left out."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def has_children(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).children())
    return False


def kill_descendants() -> None:
    """By SIGKILL. One that is being forked meanwhile may escape: call this until none is left."""
    for process in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def collect_ended() -> dict[int, int]:
    """The exit codes (negative: the signal) of children that have ended, by process id."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return codes
