"""Starting servers, finding them, connecting to them, and seeing them off."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from foreprop.config import Config, child_environment
from foreprop.engine.server import Server, StreamWrapper
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from foreprop.net.pacing import Link, PacedStream
from foreprop.net.stream import SocketStream, Stream
from foreprop.net.tcp import connect, listen, local_address, tune

DEDICATED_SESSIONS = "foreprop/dedicated/sessions"


def dedicated_key(session: int) -> str:
    """The raw store's key that announces a session to `foreprop server`."""
    return f"foreprop/dedicated/{session}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """What a server process is told on its command line; all else comes with the first frame."""

    index: int
    session_id: str
    config: dict[str, object]
    node: int | None
    workers_per_node: int

    def encode(self) -> str:
        return json.dumps(asdict(self))


class ServerHandle(Protocol):
    """A server that this process has started."""

    def finish(self, *, kill: bool) -> None:
        """Wait for it to end by itself, or end it now."""


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

    def finish(self, *, kill: bool) -> None:
        if not kill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=300)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self._process.wait(timeout=0.5 if kill else 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

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

    def finish(self, *, kill: bool) -> None:
        if kill:
            self._server.cancel()
        self._thread.join()


class NodeLinks:
    """The emulated network interface of one node, shared by its processes."""

    def __init__(self, session_id: str, node: int, workers_per_node: int, rate: float) -> None:
        folder = Path(tempfile.gettempdir())
        self._paths = [
            folder / f"foreprop-{session_id}-{node}-{way}" for way in ("egress", "ingress")
        ]
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
    wrap: StreamWrapper | None = links.wrap if links is not None else None
    return Server(index=task.index, session_id=task.session_id, config=config, wrap=wrap)


class Connections:
    """A worker's connections to all servers of a session, and the servers it has started."""

    def __init__(self, world: World, config: Config) -> None:
        self.number = world.next_session()
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
        self._key = f"session/{self.number}"
        self.links: NodeLinks | None = None
        self.session_id = ""

    def open(self) -> None:
        """Start this node's servers if it is this worker's task, then connect to all."""
        try:
            self.session_id = self._agree_on_session()
            self.links = node_links(self._config, self.session_id, self.node, self.workers_per_node)
            if not self._config.dedicated_servers:
                self._start_servers()
            for server in range(self.servers):
                self.streams.append(self._connect(server))
        except BaseException:
            self.close(kill=True)
            raise

    def _agree_on_session(self) -> str:
        world = self._world
        if world.rank == 0:
            session_id = secrets.token_hex(8)
            if self._config.dedicated_servers:
                number = world.raw_store.add(DEDICATED_SESSIONS, 1)
                session_id = f"{number}-{session_id}"
                announcement = {"session_id": session_id, "servers": self.servers}
                world.raw_store.set(dedicated_key(number), json.dumps(announcement))
            world.publish(self._key, session_id)
            return session_id
        what = "rank 0 to start the session; does every rank call parallelize() equally often?"
        return self._lookup(self._key, what)

    def _lookup(self, key: str, what: str, *, raw: bool = False) -> str:
        timeout_s = self._config.join_timeout_s
        return self._world.lookup(key, timeout_s=timeout_s, what=what, raw=raw).decode()

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
            self._world.publish(f"{self._key}/server/{index}", f"{self.address} {port}")

    def _connect(self, server: int) -> Stream:
        dedicated = self._config.dedicated_servers
        if dedicated:
            number = self.session_id.partition("-")[0]
            key = f"{dedicated_key(int(number))}/server/{server}"
            what = f"dedicated server {server} of {dedicated}; start `foreprop server`"
        else:
            key, what = f"{self._key}/server/{server}", f"server {server} to start"
        address, port = self._lookup(key, what, raw=bool(dedicated)).split()
        sock = connect(address, int(port), timeout_s=self._config.join_timeout_s)
        self._sockets.append(sock)
        tune(
            sock,
            unsent_bytes=self._config.unsent_bytes,
            timeout_s=self._config.step_timeout_s,
            emulated=self.links is not None,
        )
        stream: Stream = SocketStream(sock, f"server {server}")
        if self.links is not None:
            node = -1 if dedicated else server // self._config.servers_per_node
            stream = self.links.wrap_to_node(stream, node)
        return stream

    def settled(self) -> None:
        """Every process has joined: names that were needed only for that can go."""
        if self.links is not None:
            self.links.unlink()

    def close(self, *, kill: bool) -> None:
        for stream in self.streams:
            stream.close()
        for handle in self.handles:
            handle.finish(kill=kill)
        self.handles.clear()
        if self.links is not None:
            self.links.close()
            self.links = None

    def forget_in_child(self) -> None:
        """In a forked child: let go of what only the parent may keep alive."""
        for sock in self._sockets:
            sock.close()
        for handle in self.handles:
            if isinstance(handle, ProcessServer):
                handle.forget_in_child()
