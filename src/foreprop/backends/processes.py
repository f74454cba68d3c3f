"""Servers and relays of a worker, in processes or threads: what they are told, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foreprop.config import child_environment

_REPORT_S = 10.0
_PR_SET_PDEATHSIG = 1
PROGRAM = (sys.executable, "-P", "-m", "foreprop.backends")
"""How servers are started: without -P a file called random.py in the folder would be Python's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """What a server process is told on its command line; all else comes with the first frame."""

    index: int
    session_id: str
    world_size: int
    config: dict[str, object]
    node: int | None
    workers_per_node: int
    shares_node: bool = True
    """Whether other processes of the session are on its (emulated) node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTask:
    """What a node's relay process is told on its command line."""

    session_id: str
    world_size: int
    config: dict[str, object]
    node: int
    workers_per_node: int
    server_names: list[str]
    """The names of all servers, by index, for messages."""
    server_nodes: list[int]
    """The (emulated) node of each server."""
    nonces: list[str]
    """The nonces of the connections to them, in hexadecimal, if those are to be encrypted."""


class ProcessServer:
    """A server, or a relay, in a process of its own, which ends when this process does.

    ``sockets`` become the process's: a server's listener, or a relay's listeners and then its
    connections to the servers, by index.
    """

    def __init__(self, task: ServerTask | RelayTask, sockets: Sequence[socket.socket]) -> None:
        read_end, self._lifeline = os.pipe()
        descriptors = [sock.fileno() for sock in sockets]
        command = [
            *PROGRAM,
            ",".join(map(str, descriptors)),
            str(read_end),
            json.dumps(asdict(task)),
        ]
        if not isinstance(task, ServerTask):
            command.append("--relay")
        if threading.current_thread() is threading.main_thread():
            command.append("--die-with-parent")  # the kernel would take another thread's end for it
        environment = child_environment()
        if task.config.get("plugins"):  # found where the worker has found them: beside its script
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        self._process = subprocess.Popen(
            command,
            pass_fds=(*descriptors, read_end),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the workers; their end is the server's
        )
        os.close(read_end)
        for sock in sockets:
            sock.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The process's exit code, or None while it runs."""
        return self._process.poll()

    def finish(self, *, kill_after_s: float, report: Callable[[], None]) -> None:
        """Wait for the process to end by itself, and end it after a time.

        ``report`` is called once if it takes long.
        """
        if not self._wait(min(_REPORT_S, kill_after_s)) and kill_after_s > _REPORT_S:
            report()
            self._wait(kill_after_s - _REPORT_S)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if not self._wait(0.5):
            self._process.kill()
            self._process.wait()

    def _wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def forget_in_child(self) -> None:
        """Close a forked child's copy of the lifeline, which would keep the server alive."""
        with contextlib.suppress(OSError):
            os.close(self._lifeline)


class ThreadServer:
    """A server, or a relay to one, in threads of this process."""

    def __init__(self, server: Any, listener: socket.socket) -> None:
        """``server`` is an `engine.server.Server` or a `features.nodes.relay.Relay`."""
        self._thread = threading.Thread(
            target=server.run, args=(listener,), name=f"foreprop-server{server.index}", daemon=True
        )
        self._server, self._listener = server, listener
        self._thread.start()

    def finish(self, *, kill_after_s: float, report: Callable[[], None]) -> None:
        self._thread.join(min(_REPORT_S, kill_after_s))
        if self._thread.is_alive() and kill_after_s > _REPORT_S:
            report()
            self._thread.join(kill_after_s - _REPORT_S)
        self._server.end()
        self._thread.join()

    def forget_in_child(self) -> None:
        self._listener.close()
        self._server.pulses.close()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
