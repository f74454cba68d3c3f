"""Servers and relays as processes of a worker: what they are told, their start and their end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from foreprop.config import Config, child_environment

if TYPE_CHECKING:
    from foreprop.link.pacing import NodeLinks
    from foreprop.servers.main import ThreadServer
    from foreprop.servers.relaytask import RelayTask

REPORT_S = 10.0
PROGRAM = (sys.executable, "-P", "-m", "foreprop.servers")
"""Without -P a file called random.py in the working directory would be Python's."""


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
        self._process = subprocess.Popen(
            command,
            pass_fds=(*descriptors, read_end),
            stdin=subprocess.DEVNULL,
            env=child_environment() | _paths(task),
            start_new_session=True,  # Ctrl-C is for the workers; their end is the server's
        )
        os.close(read_end)
        for sock in sockets:
            sock.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def finish(self, *, kill_after_s: float, report: Callable[[], None]) -> None:
        """Wait for it to end by itself, and end it after a time.

        ``report`` is called once if it takes long.
        """
        if not self._wait(min(REPORT_S, kill_after_s)) and kill_after_s > REPORT_S:
            report()
            self._wait(kill_after_s - REPORT_S)
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
        """A forked child (a DataLoader's worker) must not keep the server alive."""
        with contextlib.suppress(OSError):
            os.close(self._lifeline)


def _paths(task: ServerTask | RelayTask) -> dict[str, str]:
    """Plugins are found where the worker has found them, as beside its script."""
    return {"PYTHONPATH": os.pathsep.join(sys.path)} if task.config.get("plugins") else {}


def start_server(
    task: ServerTask, config: Config, listener: socket.socket, *, in_process: bool
) -> ProcessServer | ThreadServer:
    if not in_process:
        return ProcessServer(task, [listener])
    from foreprop.servers.main import ThreadServer, build_server

    return ThreadServer(build_server(task, config), listener)


def node_links(
    config: Config, session_id: str, node: int | None, workers_per_node: int
) -> NodeLinks | None:
    """Of the node, if links are emulated, for trying things out on one machine."""
    if config.link_rate_bits_per_s is None or node is None:
        return None
    from foreprop.link.pacing import NodeLinks

    return NodeLinks(session_id, node, workers_per_node, config.link_rate_bits_per_s)
