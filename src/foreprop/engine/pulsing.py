"""The process that answers for a worker: ``python pulsing.py PID SECONDS``.

It says now and then that the worker is there, on the connections that come over its standard input,
whatever the worker does with its interpreter. It says nothing while the worker is stopped
(SIGSTOP), and ends with it. It imports no other module of foreprop: it is to be small.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys

_MOST_DESCRIPTORS = 16
_STOPPED = b"T"
"""A stopped process in /proc; one that a debugger has stopped shows as t, which may last."""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP), as far as the system tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == _STOPPED
    except (OSError, IndexError):
        return False


def main() -> None:
    worker, pulse_s = int(sys.argv[1]), float(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):  # for the worker, who may want to save first
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=0)
    connections: list[socket.socket] = []
    while os.getppid() == worker:  # a fork of it may hold the other end, too
        if select.select([control], [], [], pulse_s)[0]:
            data, descriptors, *_ = socket.recv_fds(control, 1, _MOST_DESCRIPTORS)
            if not data:
                return
            connections += [socket.socket(fileno=number) for number in descriptors]
            _beat(connections[-len(descriptors) :])
        elif not is_stopped(worker):
            _beat(connections)


def _beat(connections: list[socket.socket]) -> None:
    for connection in list(connections):
        try:
            with contextlib.suppress(BlockingIOError):  # it has been told often enough
                connection.send(b"\0", socket.MSG_DONTWAIT)
        except OSError:
            connections.remove(connection)
            connection.close()


if __name__ == "__main__":
    main()
