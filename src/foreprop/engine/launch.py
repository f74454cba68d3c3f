"""Starting servers, finding them, connecting to them, and seeing them off."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from foreprop.config import Config, child_environment
from foreprop.engine.meeting import Meeting
from foreprop.engine.server import Server, StreamWrapper
from foreprop.engine.world import World
from foreprop.errors import ConfigError, HandshakeError, TransportError
from foreprop.net.pacing import Link, PacedStream
from foreprop.net.stream import SocketStream, Stream
from foreprop.net.tcp import check_reachable, connect, listen, local_address, tune
from foreprop.version import __version__

DEDICATED_SESSIONS = "foreprop/dedicated/sessions"
_REPORT_S = 10.0
_LEAST_WINDOW_BYTES = 8192
"""Of a connection: below this the kernel would send every few segments by themselves."""
_END_BY_ITSELF_S = 3.0
"""A server that has to end is given this long to tell the other workers why."""


def dedicated_key(session: int) -> str:
    """The raw store's key that announces a session to `foreprop server`."""
    return f"foreprop/dedicated/{session}"


REFUSED = "refused "
"""How an entry begins that says why a dedicated server will not come."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells `foreprop server` about a session."""

    session_id: str
    servers: int
    nodes: int
    workers_per_node: int
    foreprop: str
    config: dict[str, str | int | float | None]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """What a server process is told on its command line; all else comes with the first frame."""

    index: int
    session_id: str
    config: dict[str, object]
    node: int | None
    workers_per_node: int
    shares_node: bool = True
    """Whether other processes of the session are on its (emulated) node."""

    def encode(self) -> str:
        return json.dumps(asdict(self))


class ServerHandle(Protocol):
    """A server that this process has started."""

    def finish(self, *, kill_after_s: float | None, report: Callable[[], None]) -> None:
        """Wait for it to end by itself, and end it after a time if one is given.

        Without one ``report`` is called once if it takes long.
        """


class ProcessServer:
    """A server in a process of its own, which ends when this process does."""

    def __init__(self, task: ServerTask, listener: socket.socket) -> None:
        read_end, self._lifeline = os.pipe()
        command = [
            sys.executable,
            "-m",
            "foreprop.engine.main",
            str(listener.fileno()),
            str(read_end),
            task.encode(),
        ]
        if threading.current_thread() is threading.main_thread():
            command.append("--die-with-parent")  # the kernel would take another thread's end for it
        self._process = subprocess.Popen(
            command,
            pass_fds=(listener.fileno(), read_end),
            stdin=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is for the workers; their end is the server's
        )
        os.close(read_end)
        listener.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def finish(self, *, kill_after_s: float | None, report: Callable[[], None]) -> None:
        if kill_after_s is not None:
            self._wait(kill_after_s)
        elif not self._wait(_REPORT_S):
            report()
            self._process.wait()
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
    """A server in threads of this process."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        self._thread = threading.Thread(
            target=server.run, args=(listener,), name=f"foreprop-server{server.index}", daemon=True
        )
        self._server = server
        self._thread.start()

    def finish(self, *, kill_after_s: float | None, report: Callable[[], None]) -> None:
        self._thread.join(_REPORT_S if kill_after_s is None else kill_after_s)
        if kill_after_s is not None:
            self._server.cancel()
        elif self._thread.is_alive():
            report()
        self._thread.join()


class NodeLinks:
    """The emulated network interface of one node, shared by its processes."""

    def __init__(self, session_id: str, node: int, workers_per_node: int, rate: float) -> None:
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


def unlink_links(task: ServerTask) -> None:
    """Remove what a node that has died on the way may have left."""
    if task.node is not None:
        for path in _link_paths(task.session_id, task.node):
            path.unlink(missing_ok=True)


def node_links(
    config: Config, session_id: str, node: int | None, workers_per_node: int
) -> NodeLinks | None:
    if config.link_rate_bits_per_s is None or node is None:
        return None
    return NodeLinks(session_id, node, workers_per_node, config.link_rate_bits_per_s)


def start_server(
    task: ServerTask, config: Config, listener: socket.socket, *, in_process: bool
) -> ServerHandle:
    if not in_process:
        return ProcessServer(task, listener)
    return ThreadServer(build_server(task, config), listener)


def build_server(task: ServerTask, config: Config) -> Server:
    links = node_links(config, task.session_id, task.node, task.workers_per_node)
    if links is not None and not task.shares_node:
        links.unlink()
    wrap: StreamWrapper | None = links.wrap if links is not None else None
    server = Server(index=task.index, session_id=task.session_id, config=config, wrap=wrap)
    if links is not None:
        weakref.finalize(server, links.close)  # in this process; another one's end closes them
    return server


class Connections:
    """A worker's connections to all servers of a session, and the servers it has started."""

    def __init__(self, world: World, config: Config, part: str = "") -> None:
        self.meeting = Meeting(world, config, part)
        self.streams: list[Stream] = []
        self.handles: list[ServerHandle] = []
        self._world = world
        self._config = config
        self._sockets: list[socket.socket] = []
        self.workers_per_node = config.workers_per_node or world.local_size
        self.nodes = -(-world.size // self.workers_per_node)
        self.node = world.rank // self.workers_per_node
        self.servers = config.dedicated_servers or self.nodes * config.servers_per_node
        if self.servers < 1:
            raise ConfigError("servers_per_node is 0 and there are no dedicated_servers")
        self.address = local_address(world.host, config.interface)
        if world.size > world.local_size:
            check_reachable(self.address, world.host)
        self.links: NodeLinks | None = None
        self.session_id = ""

    def open(self) -> None:
        """Start this node's servers if it is this worker's task, then connect to all."""
        self._check_dedicated()
        try:
            self.session_id = self._agree_on_session()
            self.links = node_links(self._config, self.session_id, self.node, self.workers_per_node)
            if not self._config.dedicated_servers:
                self._start_servers()
            for server in range(self.servers):
                self.streams.append(self._connect(server))
        except BaseException as error:
            self.meeting.refuse(error)
            self.close(kill=True, patience_s=0.0)  # the servers have not been told anything
            raise

    def _check_dedicated(self) -> None:
        if self._config.dedicated_servers and self._world.size == 1 and self._world.in_process:
            raise ConfigError(
                f"dedicated_servers is {self._config.dedicated_servers}, and servers find the"
                " workers through torchrun's rendezvous: start the script with torchrun"
            )

    def _agree_on_session(self) -> str:
        session_id = ""
        if self._world.rank == 0:
            session_id = secrets.token_hex(8)
            if self._config.dedicated_servers:
                session_id = self._announce_to_dedicated(session_id)
        return self.meeting.agree(session_id, self._shape())

    def _shape(self) -> dict[str, object]:
        """What decides who listens and who connects."""
        return {
            "world size": self._world.size,
            "architecture": "ps" if self._config.dedicated_servers else "p2p",
            "workers_per_node": self.workers_per_node,
            "servers_per_node": self._config.servers_per_node,
            "dedicated_servers": self._config.dedicated_servers,
            "servers": self.servers,
        }

    def _announce_to_dedicated(self, token: str) -> str:
        store = self._world.raw_store
        number = store.add(DEDICATED_SESSIONS, 1)
        session_id = f"{number}-{token}"
        announcement = Announcement(
            session_id=session_id,
            servers=self.servers,
            nodes=self.nodes,
            workers_per_node=self.workers_per_node,
            foreprop=__version__,
            config=asdict(self._config),
        )
        store.set(dedicated_key(number), announcement.encode())
        return session_id

    def _start_servers(self) -> None:
        if self._world.rank % self.workers_per_node:
            return
        for i in range(self._config.servers_per_node):
            index = self.node * self._config.servers_per_node + i
            listener = listen(self.address)
            port = listener.getsockname()[1]
            task = ServerTask(
                index=index,
                session_id=self.session_id,
                config=asdict(self._config),
                node=self.node,
                workers_per_node=self.workers_per_node,
            )
            in_process = self._world.in_process
            self.handles.append(start_server(task, self._config, listener, in_process=in_process))
            self.meeting.publish(f"server/{index}", f"{self.address} {port}")

    def _connect(self, server: int) -> Stream:
        dedicated = self._config.dedicated_servers
        if dedicated:
            number = self.session_id.partition("-")[0]
            key = f"{dedicated_key(int(number))}/server/{server}"
            what = (
                f"dedicated server {server} of {dedicated}; start `foreprop server --count"
                f" {dedicated}{self._rendezvous_option()}`"
            )
        else:
            key = f"{self.meeting.key}/server/{server}"
            what = f"server {server}, which rank {self._starter_of(server)} starts"
        found = self.meeting.lookup(key, what, raw=bool(dedicated))
        if found.startswith(REFUSED):
            raise HandshakeError(found.removeprefix(REFUSED))
        address, port = found.split()
        self._check_reachable(server, address)
        sock = self._connect_to(address, int(port))
        self._sockets.append(sock)
        tune(
            sock,
            unsent_bytes=self._config.unsent_bytes,
            timeout_s=self._config.step_timeout_s,
            window_bytes=self._window_bytes(sock),
            emulated=self.links is not None,
        )
        stream: Stream = SocketStream(sock, f"server {server}")
        if self.links is not None:
            node = -1 if dedicated else server // self._config.servers_per_node
            stream = self.links.wrap_to_node(stream, node)
        return stream

    def _window_bytes(self, sock: socket.socket) -> int | None:
        """How much of the pushes may be under way on this connection.

        Within a machine there is no link to keep free, and less than one of loopback's segments
        of 64 KiB would be acknowledged only after the kernel's delay of 40 ms.
        """
        if sock.getsockname()[0] == sock.getpeername()[0]:
            return None
        return max(_LEAST_WINDOW_BYTES, self._config.push_window_bytes // self.servers)

    def _connect_to(self, address: str, port: int) -> socket.socket:
        timeout_s = self._config.join_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            self.meeting.check_refused()
            try:
                return connect(address, port, timeout_s=min(1.0, timeout_s))
            except TransportError as error:
                if time.monotonic() >= deadline:
                    rank = self._world.rank
                    raise TransportError(
                        f"rank {rank} tried for {timeout_s:g} s (join_timeout_s): {error}"
                    ) from error

    def _rendezvous_option(self) -> str:
        store: Any = self._world.raw_store
        port = getattr(store, "port", None)
        return f" --rendezvous {self._world.host}:{port}" if port else ""

    def _check_reachable(self, server: int, address: str) -> None:
        theirs, ours = ipaddress.ip_address(address), ipaddress.ip_address(self.address)
        if theirs.is_loopback and not ours.is_loopback:
            raise TransportError(
                f"server {server} listens on {address}, where only its own machine can reach it;"
                f" rank {self._world.rank} is at {self.address}. Set interface (or"
                " FOREPROP_INTERFACE) on that machine, or give torchrun a rendezvous address that"
                " is not a loopback one"
            )

    def server_names(self) -> list[str]:
        """Each server with who goes if it goes."""
        if self._config.dedicated_servers:
            return [f"server {i} (dedicated)" for i in range(self.servers)]
        return [f"server {i} (beside rank {self._starter_of(i)})" for i in range(self.servers)]

    def _starter_of(self, server: int) -> int:
        return server // self._config.servers_per_node * self.workers_per_node

    def settled(self) -> None:
        """Every process has joined: names that were needed only for that can go."""
        if self.links is not None:
            self.links.unlink()

    def close(self, *, kill: bool, patience_s: float = _END_BY_ITSELF_S) -> None:
        for stream in self.streams:
            stream.close()
        for handle in self.handles:
            handle.finish(kill_after_s=patience_s if kill else None, report=self._report_waiting)
        self.handles.clear()
        if self.links is not None:
            self.links.close()
            self.links = None

    def _report_waiting(self) -> None:
        text = (
            f"foreprop: rank {self._world.rank} is done and keeps its server for the ranks that"
            " have not closed their session yet"
        )
        print(text, file=sys.stderr, flush=True)

    def forget_in_child(self) -> None:
        """In a forked child: let go of what only the parent may keep alive."""
        for sock in self._sockets:
            sock.close()
        for handle in self.handles:
            if isinstance(handle, ProcessServer):
                handle.forget_in_child()
