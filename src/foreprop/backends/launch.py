"""A worker's way to its servers: starting them, finding them, connecting, and seeing them off."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foreprop.backends.processes import ProcessServer, RelayTask, ServerTask, ThreadServer
from foreprop.config import LOGGER, Config
from foreprop.core.manifest import Manifest
from foreprop.core.sendqueue import SendBound, runs_ahead, takes_turns, window_share_bytes
from foreprop.engine.connection import greeting
from foreprop.engine.native import why_not
from foreprop.engine.pulses import WorkerPulses, pulse_greeting
from foreprop.engine.rendezvous import agree_on_session, parse_address, session_board
from foreprop.engine.stream import (
    SocketStream,
    Stream,
    check_reachable,
    connect,
    is_loopback,
    listen,
    local_address,
    stays_on_this_machine,
    tune,
)
from foreprop.engine.world import World
from foreprop.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from foreprop.core.authentication import Channel
    from foreprop.engine.pacing import NodeLinks
    from foreprop.engine.plane import Plane

_END_BY_ITSELF_S = 3.0
"""How long a server that has to end may take to tell the other workers why."""
_AGAIN_S = 0.1
_TOLD_S, _LOOK_S = 2.0, 0.05
"""How long a rank that was refused may take to leave word in the store; how often it is read."""
_PULSE_S, _PULSE_TRIES = 5.0, 3
"""How long and how often to try once more to connect to a server, which strangers may crowd."""


class Connections:
    """A worker's connections to all servers of a session, and the servers it has started.

    With local aggregation they are to its node's relays, one for each server.
    """

    def __init__(self, world: World, config: Config, part: str = "") -> None:
        self.board = session_board(world, config, part)
        self.streams: list[Stream] = []
        self.handles: list[ProcessServer | ThreadServer] = []
        self._world = world
        self._config = config
        self.channel: Channel | None = None
        """The channel of the connection made last, where a secret is shown."""
        self.sockets: list[socket.socket] = []
        """The sockets to each server, for encrypted ones those of both ways."""
        self.workers_per_node = config.workers_per_node or world.local_size
        self.nodes = -(-world.size // self.workers_per_node)
        self.node = world.rank // self.workers_per_node
        self.servers = config.servers_on(self.nodes)
        if self.servers < 1:
            raise ConfigError("servers_per_node is 0 and there are no dedicated_servers")
        self.workers_per_push = self._plan_local_aggregation()
        self.address = local_address(world.host, config.interface)
        if world.size > world.local_size:
            check_reachable(self.address, world.host, config.interface)
        self.links: NodeLinks | None = None
        self.pass_links = (
            config.link_rate_bits_per_s is not None
        )  # or connections leave the machine
        self.session_id = ""
        self.plane: Plane | None = None
        """What carries slices, if anything does but Python."""
        self.pulses = WorkerPulses(world.rank, config)
        self.pulses.tell(lambda *_: world.hurry_store())  # whoever has it may be silent

    def _plan_local_aggregation(self) -> int:
        """The number of workers whose gradients a push has; raises `ConfigError`."""
        config, workers = self._config, min(self.workers_per_node, self._world.size)
        crosses = self.nodes > 1 or config.dedicated_servers > 0
        if config.local_aggregation == "on" and (workers == 1 or not crosses):
            raise ConfigError(
                f"local_aggregation is 'on' with {workers} of {self._world.size} workers on a node:"
                " there is nothing to aggregate before it crosses a link; use 'auto'"
            )
        return workers if crosses and config.may_aggregate else 1

    def use_plane(self, manifest: Manifest) -> str:
        """Have the native plane carry the slices; returns why not, if so. Before `open`."""
        if reason := why_not(manifest, self._config):
            if self._config.plane == "native":
                raise ConfigError(f"plane is 'native', which is not to be had: {reason}")
            return reason
        from foreprop.engine.plane import Plane

        kind = Plane
        if self._config.encryption is not None:
            from foreprop.engine.encryptedplane import EncryptedPlane

            kind = EncryptedPlane
        servers = self._own_servers()
        self.plane = kind(manifest, self._config, rank=self._world.rank, servers=servers)
        return ""

    def _own_servers(self) -> Sequence[int]:
        """The servers that this worker starts."""
        has_none = self._config.dedicated_servers or self._config.join is not None
        if has_none or self._world.rank != self.first_rank:
            return ()
        each = self._config.servers_per_node
        return range(self.node * each, (self.node + 1) * each)

    @property
    def first_rank(self) -> int:
        """The first rank of this node."""
        return self.node * self.workers_per_node

    def open(self, join: Callable[[], None] | None = None) -> None:
        """Start this node's servers if it is this worker's task, then connect to all.

        ``join`` connects a newcomer instead, whose servers are there.
        """
        try:
            if join is not None:
                join()
                return
            self.session_id = self._agree_on_session()
            if (rate := self._config.link_rate_bits_per_s) is not None:
                from foreprop.engine.pacing import NodeLinks

                self.links = NodeLinks(self.session_id, self.node, self.workers_per_node, rate)
            if not self._config.dedicated_servers:
                self._start_servers()
            if self.workers_per_push > 1 and self._world.rank == self.first_rank:
                self._start_relays()
            for server in range(self.servers):
                self.streams.append(self._connect(server))
        except BaseException as error:
            self.board.publish_failure(error)
            self.close(kill=True, patience_s=0.0)  # the servers have not been told anything
            raise

    def _agree_on_session(self) -> str:
        session_id = ""
        if self._world.rank == 0:
            session_id = secrets.token_hex(8)
            if self._config.dedicated_servers:
                from foreprop.backends.dedicated import publish_session

                about = (self.servers, self.nodes, self.workers_per_node)
                session_id = publish_session(self._world, self._config, session_id, *about)
        return agree_on_session(self.board, self._config, session_id, self._topology())

    def _topology(self) -> dict[str, object]:
        """What decides who listens and who connects."""
        return {
            "world size": self._world.size,
            "max_workers": self._config.max_workers,
            "architecture": "ps" if self._config.dedicated_servers else "p2p",
            "workers_per_node": self.workers_per_node,
            "servers_per_node": self._config.servers_per_node,
            "dedicated_servers": self._config.dedicated_servers,
            "servers": self.servers,
            "local_aggregation": self._config.local_aggregation,
            "encryption": self._config.encryption,
        }

    def _start_servers(self) -> None:
        for index in self._own_servers():
            listener = listen(self.address, self._config.port_range)
            port = listener.getsockname()[1]
            task = ServerTask(
                index=index,
                session_id=self.session_id,
                world_size=max(self._world.size, self._config.max_workers or 0),
                config=asdict(self._config),
                node=self.node,
                workers_per_node=self.workers_per_node,
            )
            self._start(task, [listener])
            self.board.publish(f"server/{index}", f"{self.address} {port}")

    def _start(
        self,
        task: ServerTask | RelayTask,
        listeners: Sequence[socket.socket],
        upstreams: Sequence[socket.socket] = (),
        pulses: Sequence[socket.socket] = (),
    ) -> None:
        if not self._world.in_process and self.plane is None:
            self.handles.append(ProcessServer(task, [*listeners, *upstreams, *pulses]))
            return
        from foreprop.backends.composed import build_relays, build_server

        made: Sequence[Any] = (
            build_relays(task, self._config, upstreams)
            if isinstance(task, RelayTask)
            else [build_server(task, self._config, self.plane, self._answers())]
        )
        self.handles += map(ThreadServer, made, listeners)

    def _answers(self) -> Callable[[socket.socket], None] | None:
        return None if self.plane is None or self._world.in_process else self.pulses.answer

    def _start_relays(self) -> None:
        """Start this node's relays, over connections to the servers that are made here."""
        config, servers = self._config, range(self.servers)
        nonces: list[str] = []
        task = RelayTask(
            session_id=self.session_id,
            world_size=self._world.size,
            config=asdict(config),
            node=self.node,
            workers_per_node=self.workers_per_node,
            server_names=self.direct_names(),
            server_nodes=[self.node_of(server) for server in servers],
            nonces=nonces,
        )
        upstreams: list[socket.socket] = []
        pulses: list[socket.socket] = []
        listeners: list[socket.socket] = []
        try:
            for server in servers:
                upstreams.append(self._reach(server))
                if config.encryption is not None and self.channel is not None:
                    nonces.append(self.channel.nonces.hex())
                if not self._world.in_process:
                    about = (self.session_id, f"server {server}", "the relay of ")
                    pulses.append(self._pulse_beside(upstreams[-1], *about)[1])
                listeners.append(listen(self.address, config.port_range))
        except BaseException:
            for sock in (*upstreams, *pulses, *listeners):
                sock.close()
            raise
        ports = [listener.getsockname()[1] for listener in listeners]
        self._start(task, listeners, upstreams, pulses)
        for server, port in enumerate(ports):
            self.board.publish(f"relay/{self.node}/{server}", f"{self.address} {port}")

    def _connect(self, server: int) -> Stream:
        """Connect to a server, or to this node's relay to it."""
        if self.workers_per_push == 1:
            sock, target = self._reach(server), f"server {server}"
        else:
            what = f"the relay of node {self.node}, which rank {self.first_rank} starts"
            found = self.board.lookup(f"relay/{self.node}/{server}", what)
            target = f"relay {self.node} to server {server}"
            sock = self._greeted(self._connect_to(*parse_address(found, what), target))
        stream = self._stream_over(sock, server)
        self._watch(server, sock, self.session_id, target)
        return stream

    def _watch(self, server: int, sock: socket.socket, session_id: str, target: str) -> None:
        """Have both ends of a connection say on another one that they are there.

        Threads of one process need not: none of them is stopped alone.
        """
        if self._world.in_process:
            return
        name = self.server_names()[server]
        if self.workers_per_push == 1 and not self._config.dedicated_servers:
            name += f" on node {self.node_of(server)}"
        try:
            host, pulse = self._pulse_beside(sock, session_id, target)
        except OSError as error:  # if that is a loss, what it is beside says so
            text = "rank %d will not notice if %s falls silent: %s"
            LOGGER.warning(text, self._world.rank, name, error)
        else:
            self.pulses.add(server, pulse, f"{name} at {host}")

    def _pulse_beside(
        self, sock: socket.socket, session_id: str, target: str, whose: str = ""
    ) -> tuple[str, socket.socket]:
        """Connect once more to where a connection leads; returns that host, and the connection.

        ``whose`` is for messages there, if the connection is not this worker's own.
        """
        host, port = sock.getpeername()[:2]
        about = f"{whose}node {self.node}, host {socket.gethostname()}"
        for tries_left in reversed(range(_PULSE_TRIES)):
            pulse = connect(host, port, timeout_s=_PULSE_S)
            try:
                self._authenticate(pulse, session_id, target, time.monotonic() + _PULSE_S)
                pulse.sendall(pulse_greeting(session_id, self._world.rank, about))
                break
            except OSError:
                pulse.close()
                if not tries_left:
                    raise
        return host, pulse

    def _authenticate(
        self,
        sock: socket.socket,
        session_id: str,
        target: str,
        deadline: float,
        look: Callable[[], None] = lambda: None,
    ) -> Channel | None:
        """Show the secret, if there is one, and see that the other side has it."""
        if self._config.secret_file is None:
            return None
        from foreprop.engine.secret import authenticate

        rank = self._world.rank
        return authenticate(sock, self._config, session_id, target, rank, deadline, look)

    def _stream_over(self, sock: socket.socket, server: int) -> Stream:
        """Make a stream of a connection that has greeted."""
        self.sockets.append(sock)
        direct = self.workers_per_push == 1
        try:
            window_bytes = self._window_bytes(sock)
        except OSError as error:
            raise self._ended(sock, error) from error
        order, bound, name = self._config.order, None, self.server_names()[server]
        waits = takes_turns(order, self.servers)
        if window_bytes and runs_ahead(order, self.servers):
            bound = SendBound(window_bytes)
        stream: Stream
        if self.plane is not None:
            most_bytes = 0 if bound is None else bound.bytes
            stream = self.plane.worker_stream(sock, name, server, most_bytes, self.channel)
        elif self._config.encryption is not None:
            from foreprop.engine.encrypted import connect_encrypted

            stream = connect_encrypted(sock, name, self.channel, self._config, bound)
            self.sockets += stream.ways
        else:
            stream = SocketStream(sock, name, bound)
        if self.links is not None and direct:
            stream = self.links.wrap_to_node(stream, self.node_of(server))
        if window_bytes and direct and waits:
            stream.bound(window_bytes)
        return stream

    def node_of(self, server: int) -> int:
        """The (emulated) node that a server is on; -1 for a dedicated one."""
        dedicated = self._config.dedicated_servers
        return -1 if dedicated else server // self._config.servers_per_node

    def _reach(self, server: int) -> socket.socket:
        if self._config.dedicated_servers:
            from foreprop.backends.dedicated import look_up_dedicated

            look = self.board.check_failed
            about = (self._world, self._config, self.session_id)
            found, what = look_up_dedicated(server, *about, look)
        else:
            what = f"server {server}, which rank {self._starter_of(server)} starts"
            found = self.board.lookup(f"server/{server}", what)
        address, port = parse_address(found, what)
        if is_loopback(address) and not is_loopback(self.address):
            raise TransportError(
                f"server {server} listens on {address}, where only its own machine can reach it;"
                f" rank {self._world.rank} is at {self.address}. Set interface (or"
                " FOREPROP_INTERFACE) on that machine, or give torchrun a rendezvous address that"
                " is not a loopback one"
            )
        return self._greeted(self._connect_to(address, port, f"server {server}"))

    def greet_at(self, server: int, session: str, host: str, port: int) -> Stream:
        """Connect to a server that is known by its address, and greet.

        Raises `TransportError`, and `HandshakeError` if secrets differ. Does without the
        rendezvous, whose store may have gone with a node.
        """
        timeout_s, rank, target = self._config.join_timeout_s, self._world.rank, f"server {server}"
        sock = connect(host, port, timeout_s=timeout_s)
        try:
            deadline = time.monotonic() + timeout_s
            self.channel = self._authenticate(sock, session, target, deadline)
            self._tuned(sock).sendall(greeting(session, rank))
        except OSError as error:
            sock.close()
            raise TransportError(
                f"rank {rank}'s connection to server {server} at {host} port {port} ended at once:"
                f" {error}"
            ) from error
        stream = self._stream_over(sock, server)
        self._watch(server, sock, session, target)
        return stream

    def _greeted(self, sock: socket.socket) -> socket.socket:
        try:  # at once: servers do not keep for long who says nothing
            tuned = self._tuned(sock)
            tuned.sendall(greeting(self.session_id, self._world.rank))
        except OSError as error:
            raise self._ended(sock, error) from error
        return tuned

    def _ended(self, sock: socket.socket, error: OSError) -> TransportError:
        """The error for a server that has ended at once; raises the reason if it comes in time."""
        sock.close()
        deadline = time.monotonic() + _TOLD_S
        while time.monotonic() < deadline:
            self.board.check_failed()
            time.sleep(_LOOK_S)
        text = f"rank {self._world.rank}'s connection to a server ended at once: {error}"
        return TransportError(text)

    def _tuned(self, sock: socket.socket) -> socket.socket:
        self.pass_links |= not stays_on_this_machine(sock)
        tune(
            sock,
            unsent_bytes=None if self._config.lanes == "one" else self._config.unsent_bytes,
            timeout_s=self._config.step_timeout_s,
            window_bytes=self._window_bytes(sock),
            emulated=self.links is not None,
        )
        return sock

    def _window_bytes(self, sock: socket.socket) -> int | None:
        """The bytes of pushes that may be under way on this connection.

        Within a machine there is no link to keep free, and less than one of loopback's segments of
        64 KiB would be acknowledged only after the kernel's delay of 40 ms.
        """
        if self._config.lanes == "one" or stays_on_this_machine(sock):
            return None
        return window_share_bytes(self._config.push_window_bytes, self.servers, self._config.order)

    def _connect_to(self, address: str, port: int, target: str) -> socket.socket:
        timeout_s, rank = self._config.join_timeout_s, self._world.rank
        deadline = time.monotonic() + timeout_s
        while True:
            self.board.check_failed()
            try:
                sock = connect(address, port, timeout_s=min(1.0, timeout_s))
                look = self.board.check_failed
                self.channel = self._authenticate(sock, self.session_id, target, deadline, look)
                return sock
            except TransportError as error:
                if time.monotonic() >= deadline:
                    raise TransportError(
                        f"rank {rank} tried for {timeout_s:g} s (join_timeout_s): {error}"
                    ) from error
            time.sleep(_AGAIN_S)

    def server_names(self) -> list[str]:
        """Who is at the other end of each connection, and what goes with it, for messages."""
        if self.workers_per_push > 1:
            name = f"the relay of node {self.node} (beside rank {self.first_rank})"
            return [f"{name} to server {i}" for i in range(self.servers)]
        return self.direct_names()

    def direct_names(self) -> list[str]:
        if self._config.dedicated_servers:
            return [f"server {i} (dedicated)" for i in range(self.servers)]
        return [f"server {i} (beside rank {self._starter_of(i)})" for i in range(self.servers)]

    def server_ranks(self) -> list[int | None]:
        """The first rank on each server's node; None for dedicated ones."""
        beside = not self._config.dedicated_servers
        return [self._starter_of(i) if beside else None for i in range(self.servers)]

    def _starter_of(self, server: int) -> int:
        return server // self._config.servers_per_node * self.workers_per_node

    def settled(self) -> None:
        """Remove names that were needed only until every process has joined."""
        if self.links is not None:
            self.links.unlink()

    def close(self, *, kill: bool, patience_s: float = _END_BY_ITSELF_S) -> None:
        """Wait for the servers to end by themselves, or else end them."""
        limit_s = patience_s if kill else self._config.step_timeout_s
        self.pulses.close()
        for stream in self.streams:
            stream.close()
        text = f"rank {self._world.rank} is done and waits for the process of its server to end"
        for handle in self.handles:
            handle.finish(kill_after_s=limit_s, report=lambda: LOGGER.warning("%s", text))
        self.handles.clear()
        if self.plane is not None:
            self.plane.close()
        if self.links is not None:
            self.links.close()
            self.links = None

    def forget_in_child(self) -> None:
        """Let go, in a forked child, of what only the parent may keep alive."""
        for sock in self.sockets:
            sock.close()
        self.pulses.forget_in_child()
        if self.plane is not None:
            self.plane.forget_in_child()
        for handle in self.handles:
            handle.forget_in_child()
