"""Processes with pipes at all ends, and Linux's ways of leaving none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import psutil

from foreprop.tools.run.records import LIMIT_BYTES, LineSplitter

_CHUNK_BYTES = 65_536
_LAST_WORDS_S = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class PipedProcess:
    """A program that is started here (ssh, perhaps), and two threads that read its output.

    They call ``on_output`` with whole lines of its standard output, ``on_errors`` with those of its
    standard error, and ``on_end`` with its exit code when it has written all.
    """

    def __init__(
        self,
        command: list[str],
        *,
        on_output: Callable[[list[bytes]], None],
        on_errors: Callable[[list[bytes]], None],
        on_end: Callable[[int], None],
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.command = command
        self._on_end = on_end
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for who started it, who then ends all in order
        )
        pipes = ((self._process.stderr, on_errors), (self._process.stdout, on_output))
        self._readers = [
            (pipe, threading.Thread(target=self._read, args=(pipe, use, limit_bytes), daemon=True))
            for pipe, use in pipes
        ]
        for _, reader in self._readers:
            reader.start()

    def send(self, line: bytes) -> None:
        """Write a line to its standard input; nothing happens if it has ended."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write(line + b"\n")
                self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def kill_after(self, seconds: float) -> None:
        """Kill it if it does not end by itself within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        self._process.wait()

    def close_input(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def close(self) -> None:
        """Close its pipes; call this when it has ended or been killed."""
        self.close_input()
        for pipe, reader in self._readers:
            reader.join(_LAST_WORDS_S)
            if pipe is not None and not reader.is_alive():  # else another process holds the pipe
                pipe.close()

    def _read(self, pipe: Any, use: Callable[[list[bytes]], None], limit_bytes: int) -> None:
        splitter = LineSplitter(limit_bytes)
        while data := pipe.read1(_CHUNK_BYTES):
            use(splitter.feed(data))
        use(splitter.finish())
        if pipe is self._process.stdout:
            code = self._process.wait()
            self._readers[0][1].join(_LAST_WORDS_S)  # ssh's shared connections keep it open
            self._on_end(code)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while view:
            view = view[os.write(descriptor, view) :]


def exit_at_once(main: Callable[[], int]) -> NoReturn:
    """Run a program and exit with its code, without unloading torch, which takes long."""
    sys.stdout.flush()
    code = main()
    sys.stderr.flush()
    os._exit(code)


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
    """The running processes that descend from this one, without those that wait to be collected."""
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
    """Send SIGKILL. One that is being forked meanwhile may escape: call this until none is left."""
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
