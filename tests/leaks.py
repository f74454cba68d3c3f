"""Finds what a test left behind: threads, child processes, open descriptors.

A `Snapshot` before, `find_leaks` after. Descriptors are compared by what they point at, so that a
number that was closed and given out again for the same thing is no leak.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

POLL_S = 0.01
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What existed at one moment. Descriptors: how many point at each target."""

    threads: frozenset[threading.Thread]
    processes: frozenset[psutil.Process]
    descriptors: Counter[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(frozenset(threading.enumerate()), frozenset(_children()), _descriptors())


@dataclass(frozen=True, slots=True)
class Leaks:
    """What is there now and was not in the snapshot; false if there is nothing."""

    threads: frozenset[threading.Thread]
    processes: frozenset[psutil.Process]
    descriptors: Counter[str]

    def __bool__(self) -> bool:
        return bool(self.threads or self.processes or self.descriptors)

    def describe(self) -> str:
        lines = [f"thread {thread.name!r}" for thread in self.threads]
        lines += [f"process {_name_of(process)}" for process in self.processes]
        lines += [f"{count} x descriptor of {to}" for to, count in self.descriptors.items()]
        return "left behind: " + "; ".join(sorted(lines))

    def kill_processes(self) -> None:
        """So that one leak is reported once and does not disturb the tests after it."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.processes, timeout=5)


def find_leaks(before: Snapshot) -> Leaks:
    """What is left now; ended but unreaped processes do not count."""
    now = Snapshot.take()
    return Leaks(
        frozenset(t for t in now.threads - before.threads if not _is_foreign(t)),
        frozenset(p for p in now.processes - before.processes if _is_running(p)),
        now.descriptors - before.descriptors,
    )


def wait_for_leaks(before: Snapshot, grace_s: float) -> Leaks:
    """What is still left after `grace_s`; returns at once if nothing is left."""
    deadline_s = time.monotonic() + grace_s
    leaks = find_leaks(before)
    while leaks and time.monotonic() < deadline_s:
        gc.collect()  # an unclosed socket in a cycle then warns, and a warning is an error
        time.sleep(POLL_S)
        leaks = find_leaks(before)
    return leaks


def adopt_orphans() -> None:
    """Make this process the new parent of its orphaned descendants, so that they can be seen.

    Otherwise a server whose worker was killed would belong to init and escape the detector.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_ended(before: Snapshot) -> None:
    """Collect the exit codes of ended children that were not there before (adopted ones too)."""
    for process in frozenset(_children()) - before.processes:
        if not _is_running(process):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _children() -> list[psutil.Process]:
    if not _has_children():
        return []  # as before and after most tests: psutil would look at every process there is
    helpers = {
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    }
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.pid not in helpers]


def _has_children() -> bool:
    """Whether this process has children, or the kernel does not tell."""
    try:
        told = [path.read_bytes() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread has ended meanwhile
        return True
    return not told or any(told)


def _descriptors() -> Counter[str]:
    """Targets of this process's descriptors, but for those that are kept open for later use.

    Multiprocessing keeps its own, and matplotlib the files of the fonts that it has drawn with.
    """
    helpers = {
        getattr(resource_tracker._resource_tracker, "_fd", None),
        getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
    }
    targets: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) not in helpers:
            with contextlib.suppress(OSError):  # listdir's own descriptor is closed by now
                target = os.readlink(f"/proc/self/fd/{fd}")
                targets[target] += "/mpl-data/fonts/" not in target
    return targets


def _is_foreign(thread: threading.Thread) -> bool:
    """A native thread (torch's) that once ran Python: it cannot be joined, and ends unseen."""
    return isinstance(thread, threading._DummyThread)


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _name_of(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({' '.join(process.cmdline())[:120]})"
    except psutil.Error:
        return f"{process.pid}"
