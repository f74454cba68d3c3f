"""Servers and relays as processes, or threads of this one: what they are told, and their end.

The processes of one node may share an emulated network interface (`NodeLinks`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from foreprop.config import Config, child_environment
from foreprop.link.stream import SocketStream, Stream

if TYPE_CHECKING:  # most workers have them in processes of their own
    from foreprop.path.server import Server
    from foreprop.relays.relay import Relay

_REPORT_S = 10.0


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

    def encode(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTask:
    """What a node's relay process is told on its command line."""

    session_id: str
    world_size: int
    config: dict[str, object]
    node: int
    workers_per_node: int
    server_names: list[str]
    """Of all servers, by index, for messages."""
    server_nodes: list[int]
    """Which (emulated) node each is on."""

    def encode(self) -> str:
        return json.dumps(asdict(self))


class ServerHandle(Protocol):
    """A server that this process has started."""

    def finish(self, *, kill_after_s: float, report: Callable[[], None]) -> None:
        """Wait for it to end by itself, and end it after a time.

        ``report`` is called once if it takes long.
        """


class ProcessServer:
    """A server, or a relay, in a process of its own, which ends when this process does.

    ``sockets`` become the process's: a server's listener, or a relay's listeners and then its
    connections to the servers, by index.
    """

    def __init__(self, task: ServerTask | RelayTask, sockets: Sequence[socket.socket]) -> None:
        read_end, self._lifeline = os.pipe()
        descriptors = [sock.fileno() for sock in sockets]
        command = [
            sys.executable,
            "-m",
            "foreprop.servers.main",
            ",".join(map(str, descriptors)),
            str(read_end),
            task.encode(),
        ]
        if isinstance(task, RelayTask):
            command.append("--relay")
        if threading.current_thread() is threading.main_thread():
            command.append("--die-with-parent")  # the kernel would take another thread's end for it
        self._process = subprocess.Popen(
            command,
            pass_fds=(*descriptors, read_end),
            stdin=subprocess.DEVNULL,
            env=child_environment(),
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
        """A forked child (a DataLoader's worker) must not keep the server alive."""
        with contextlib.suppress(OSError):
            os.close(self._lifeline)


class ThreadServer:
    """A server, or a relay to one, in threads of this process."""

    def __init__(self, server: Server | Relay, listener: socket.socket) -> None:
        self._thread = threading.Thread(
            target=server.run, args=(listener,), name=f"foreprop-server{server.index}", daemon=True
        )
        self._server = server
        self._thread.start()

    def finish(self, *, kill_after_s: float, report: Callable[[], None]) -> None:
        self._thread.join(min(_REPORT_S, kill_after_s))
        if self._thread.is_alive() and kill_after_s > _REPORT_S:
            report()
            self._thread.join(kill_after_s - _REPORT_S)
        self._server.cancel()
        self._thread.join()


def start_server(
    task: ServerTask, config: Config, listener: socket.socket, *, in_process: bool
) -> ServerHandle:
    if not in_process:
        return ProcessServer(task, [listener])
    return ThreadServer(build_server(task, config), listener)


def build_server(task: ServerTask, config: Config) -> Server:
    from foreprop.path.server import Server
    from foreprop.servers.composed import ServerComposer

    links = node_links(config, task.session_id, task.node, task.workers_per_node)
    if links is not None and not task.shares_node:
        links.unlink()
    wrap = links.wrap if links is not None else None
    server = Server(
        index=task.index,
        session_id=task.session_id,
        config=config,
        composer=ServerComposer(),
        world_size=task.world_size,
        wrap=wrap,
    )
    if links is not None:
        weakref.finalize(server, links.close)  # in this process; another one's end closes them
    return server


def build_relays(
    task: RelayTask, config: Config, upstreams: Sequence[socket.socket]
) -> list[Relay]:
    """A node's relays, one to each server. ``upstreams``: the connections, by server."""
    from foreprop.relays.relay import Relay

    links = node_links(config, task.session_id, task.node, task.workers_per_node)
    relays = []
    for server, sock in enumerate(upstreams):
        name = task.server_names[server]
        stream: Stream = SocketStream(sock, name)
        if links is not None:
            stream = links.wrap_to_node(stream, task.server_nodes[server])
        relay = Relay(
            server=server,
            server_name=name,
            node=task.node,
            first_rank=task.node * task.workers_per_node,
            session_id=task.session_id,
            config=config,
            world_size=task.world_size,
            upstream=stream,
        )
        if links is not None:
            weakref.finalize(relay, links.close)
        relays.append(relay)
    return relays


class NodeLinks:
    """The emulated network interface of one node, shared by its processes."""

    def __init__(self, session_id: str, node: int, workers_per_node: int, rate: float) -> None:
        from foreprop.link.pacing import Link

        self._paths = _link_paths(session_id, node)
        self._links = [Link(rate, path) for path in self._paths]
        self._node = node
        self._workers_per_node = workers_per_node

    def wrap(self, stream: Stream, rank: int) -> Stream:
        """Put the links around a stream to a worker, unless it is on the same node."""
        return self.wrap_to_node(stream, rank // self._workers_per_node)

    def wrap_to_node(self, stream: Stream, node: int) -> Stream:
        if node == self._node:
            return stream
        from foreprop.link.pacing import PacedStream

        return PacedStream(stream, egress=self._links[0], ingress=self._links[1])

    def unlink(self) -> None:
        """Remove the files' names once every process of the node has opened them."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        for link in self._links:
            link.close()


def _link_paths(session_id: str, node: int) -> list[Path]:
    folder = Path(tempfile.gettempdir())
    return [folder / f"foreprop-{session_id}-{node}-{way}" for way in ("egress", "ingress")]


def unlink_links(session_id: str, node: int | None) -> None:
    """Remove what a node that has died on the way may have left."""
    if node is not None:
        for path in _link_paths(session_id, node):
            path.unlink(missing_ok=True)


def node_links(
    config: Config, session_id: str, node: int | None, workers_per_node: int
) -> NodeLinks | None:
    """Of the node, if links are emulated, for trying things out on one machine."""
    if config.link_rate_bits_per_s is None or node is None:
        return None
    return NodeLinks(session_id, node, workers_per_node, config.link_rate_bits_per_s)
