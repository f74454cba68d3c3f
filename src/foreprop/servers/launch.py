"""A worker's way to its servers: starting them, finding them, connecting, and seeing them off."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from foreprop.cluster.rendezvous import agree_on_session, session_board
from foreprop.cluster.world import World
from foreprop.config import LOGGER, Config
from foreprop.core.sendbound import SendBound
from foreprop.core.sendqueue import runs_ahead, takes_turns, window_share_bytes
from foreprop.errors import ConfigError, RemoteProtocolError, TransportError
from foreprop.link.connection import greeting
from foreprop.link.pulses import WorkerPulses, pulse_greeting
from foreprop.link.stream import (
    SocketStream,
    Stream,
    connect,
    is_loopback,
    listen,
    local_address,
    stays_on_this_machine,
    tune,
)
from foreprop.servers.processes import ProcessServer, ServerTask, node_links, start_server

if TYPE_CHECKING:
    from foreprop.core.authentication import Channel
    from foreprop.elastic.whereabouts import ServerPlace
    from foreprop.link.pacing import NodeLinks
    from foreprop.servers.main import ThreadServer

_END_BY_ITSELF_S = 3.0
_AGAIN_S = 0.1
"""A server that has to end is given this long to tell the other workers why."""
_TOLD_S, _LOOK_S = 2.0, 0.05
"""So long who has been refused may take to leave word of it in the store; so often it is read."""
_PULSE_S, _PULSE_TRIES = 5.0, 3
"""To connect once more to a server that listens, though strangers may crowd it."""


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
        """Of the connection made last, where a secret is shown."""
        self.sockets: list[socket.socket] = []
        """To each server, and of encrypted ones those of both ways."""
        self.places: list[ServerPlace] = []
        """Of a newcomer: where the servers were when it came."""
        self.lost: list[int] = []
        """Of these, those that were no more."""
        self.workers_per_node = config.workers_per_node or world.local_size
        self.nodes = -(-world.size // self.workers_per_node)
        self.node = world.rank // self.workers_per_node
        self.servers = config.servers_on(self.nodes)
        if self.servers < 1:
            raise ConfigError("servers_per_node is 0 and there are no dedicated_servers")
        self.workers_per_push = self._plan_local_aggregation()
        self.address = local_address(world.host, config.interface)
        if world.size > world.local_size:
            from foreprop.link.announced import check_reachable

            check_reachable(self.address, world.host, config.interface)
        self.links: NodeLinks | None = None
        self.pass_links = (
            config.link_rate_bits_per_s is not None
        )  # or connections leave the machine
        self.session_id = ""
        self.pulses = WorkerPulses(world.rank, config)
        self.pulses.tell(lambda *_: world.hurry_store())  # whoever has it may be silent

    def _plan_local_aggregation(self) -> int:
        """How many workers' gradients each push to a server is to have; raises `ConfigError`."""
        config, workers = self._config, min(self.workers_per_node, self._world.size)
        crosses = self.nodes > 1 or config.dedicated_servers > 0
        if config.local_aggregation == "on" and (workers == 1 or not crosses):
            from foreprop.quantities import counted  # for messages

            raise ConfigError(
                f"local_aggregation is 'on' with {counted(workers, 'worker')} per node and"
                f" {counted(self.nodes, 'node')}: there is nothing to aggregate before"
                " it crosses a link; use 'auto'"
            )
        sums = config.local_aggregation != "off" and config.staleness in (0, "late")
        sums = sums and not config.counts_some
        return workers if crosses and sums else 1

    @property
    def first_rank(self) -> int:
        """Of this node."""
        return self.node * self.workers_per_node

    def open(self) -> None:
        """Start this node's servers if it is this worker's task, then connect to all."""
        try:
            if self._config.join is not None:
                from foreprop.servers.entering import connect_to_all

                connect_to_all(self, self._world, self._config)
                return
            self.session_id = self._agree_on_session()
            self.links = node_links(self._config, self.session_id, self.node, self.workers_per_node)
            if not self._config.dedicated_servers:
                self._start_servers()
            if self.workers_per_push > 1 and self._world.rank == self.first_rank:
                from foreprop.servers.relaystart import start_relays

                start_relays(self, self._world, self._config)
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
                from foreprop.servers.dedicated import publish_session

                about = (self.servers, self.nodes, self.workers_per_node)
                session_id = publish_session(self._world, self._config, session_id, *about)
        return agree_on_session(self.board, self._config, session_id, self._shape())

    def _shape(self) -> dict[str, object]:
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
        if self._world.rank != self.first_rank:
            return
        for i in range(self._config.servers_per_node):
            index = self.node * self._config.servers_per_node + i
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
            in_process = self._world.in_process
            self.handles.append(start_server(task, self._config, listener, in_process=in_process))
            self.board.publish(f"server/{index}", f"{self.address} {port}")

    def _connect(self, server: int) -> Stream:
        """To a server, or to this node's relay to it."""
        if self.workers_per_push == 1:
            sock, target = self.reach(server), f"server {server}"
        else:
            from foreprop.servers.relaystart import reach_relay

            sock, target = reach_relay(self, server)
        stream = self.stream_over(sock, server)
        self.watch(server, sock, self.session_id, target)
        return stream

    def watch(self, server: int, sock: socket.socket, session_id: str, target: str) -> None:
        """Have each say to the other that it is there, beside the connection that they have.

        Threads of one process need not: none of them is stopped alone.
        """
        if self._world.in_process:
            return
        name = self.server_names()[server]
        if self.workers_per_push == 1 and not self._config.dedicated_servers:
            name += f" on node {self.node_of(server)}"
        try:
            host, pulse = self.pulse_beside(sock, session_id, target)
        except OSError as error:  # if that is a loss, what it is beside says so
            text = "rank %d will not notice if %s falls silent: %s"
            LOGGER.warning(text, self._world.rank, name, error)
        else:
            self.pulses.add(server, pulse, f"{name} at {host}")

    def pulse_beside(
        self, sock: socket.socket, session_id: str, target: str, whose: str = ""
    ) -> tuple[str, socket.socket]:
        """Where a connection leads, and a second one there. Nobody else is asked.

        ``whose``: for messages there, if it is not this worker's own.
        """
        host, port = sock.getpeername()[:2]
        about = f"{whose}node {self.node}, host {socket.gethostname()}"
        for tries_left in reversed(range(_PULSE_TRIES)):
            pulse = connect(host, port, timeout_s=_PULSE_S)
            try:
                if self._config.secret_file is not None:
                    from foreprop.link.secret import authenticate

                    shown = (session_id, target, self._world.rank)
                    deadline = time.monotonic() + _PULSE_S
                    authenticate(pulse, self._config, *shown, deadline, lambda: None)
                pulse.sendall(pulse_greeting(session_id, self._world.rank, about))
                break
            except OSError:
                pulse.close()
                if not tries_left:
                    raise
        return host, pulse

    def stream_over(self, sock: socket.socket, server: int) -> Stream:
        """A connection that has greeted, as it is used from now on."""
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
        stream: Stream = SocketStream(sock, name, bound)
        if self._config.encryption is not None:
            from foreprop.link.encrypted import connect_encrypted

            stream = connect_encrypted(sock, name, self.channel, self._config, bound)
            self.sockets += stream.ways
        if self.links is not None and direct:
            stream = self.links.wrap_to_node(stream, self.node_of(server))
        if window_bytes and direct and waits:
            stream.bound(window_bytes)
        return stream

    def node_of(self, server: int) -> int:
        """The (emulated) node that a server is on; -1 for a dedicated one's own."""
        dedicated = self._config.dedicated_servers
        return -1 if dedicated else server // self._config.servers_per_node

    def reach(self, server: int) -> socket.socket:
        if self._config.dedicated_servers:
            from foreprop.servers.dedicated import look_up_dedicated

            look = self.board.check_failed
            about = (self._world, self._config, self.session_id)
            found, what = look_up_dedicated(server, *about, look)
        else:
            what = f"server {server}, which rank {self._starter_of(server)} starts"
            found = self.board.lookup(f"server/{server}", what)
        address, port = parse_address(found, what)
        if is_loopback(address) and not is_loopback(self.address):
            from foreprop.link.announced import unreachable

            raise unreachable(server, address, self._world.rank, self.address)
        return self.greeted(self.connect_to(address, port, f"server {server}"))

    def greeted(self, sock: socket.socket) -> socket.socket:
        """At once: servers do not keep for long who says nothing."""
        try:
            tuned = self.tuned(sock)
            tuned.sendall(greeting(self.session_id, self._world.rank))
        except OSError as error:
            raise self._ended(sock, error) from error
        return tuned

    def _ended(self, sock: socket.socket, error: OSError) -> TransportError:
        """A server that ends while workers join has been told why, and soon so are we."""
        sock.close()
        deadline = time.monotonic() + _TOLD_S
        while time.monotonic() < deadline:
            self.board.check_failed()
            time.sleep(_LOOK_S)
        text = f"rank {self._world.rank}'s connection to a server ended at once: {error}"
        return TransportError(text)

    def tuned(self, sock: socket.socket) -> socket.socket:
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
        """How much of the pushes may be under way on this connection.

        Within a machine there is no link to keep free, and less than one of loopback's segments
        of 64 KiB would be acknowledged only after the kernel's delay of 40 ms.
        """
        if self._config.lanes == "one" or stays_on_this_machine(sock):
            return None
        return window_share_bytes(self._config.push_window_bytes, self.servers, self._config.order)

    def connect_to(self, address: str, port: int, target: str) -> socket.socket:
        timeout_s, rank = self._config.join_timeout_s, self._world.rank
        deadline = time.monotonic() + timeout_s
        while True:
            self.board.check_failed()
            try:
                sock = connect(address, port, timeout_s=min(1.0, timeout_s))
                if self._config.secret_file is not None:
                    from foreprop.link.secret import authenticate

                    about = (self.session_id, target, rank, deadline, self.board.check_failed)
                    self.channel = authenticate(sock, self._config, *about)
                return sock
            except TransportError as error:
                if time.monotonic() >= deadline:
                    raise TransportError(
                        f"rank {rank} tried for {timeout_s:g} s (join_timeout_s): {error}"
                    ) from error
            time.sleep(_AGAIN_S)

    def server_names(self) -> list[str]:
        """At the other end of each connection, with who goes if it goes."""
        if self.workers_per_push > 1:
            name = f"the relay of node {self.node} (beside rank {self.first_rank})"
            return [f"{name} to server {i}" for i in range(self.servers)]
        return self.direct_names()

    def direct_names(self) -> list[str]:
        if self._config.dedicated_servers:
            return [f"server {i} (dedicated)" for i in range(self.servers)]
        return [f"server {i} (beside rank {self._starter_of(i)})" for i in range(self.servers)]

    def server_ranks(self) -> list[int | None]:
        """By server, the first rank on its node; None of dedicated ones."""
        beside = not self._config.dedicated_servers
        return [self._starter_of(i) if beside else None for i in range(self.servers)]

    def _starter_of(self, server: int) -> int:
        return server // self._config.servers_per_node * self.workers_per_node

    def settled(self) -> None:
        """Every process has joined: names that were needed only for that can go."""
        if self.links is not None:
            self.links.unlink()

    def close(self, *, kill: bool, patience_s: float = _END_BY_ITSELF_S) -> None:
        """Let the servers end by themselves, for a while if they have to, or else end them."""
        limit_s = patience_s if kill else self._config.step_timeout_s
        self.pulses.close()
        for stream in self.streams:
            stream.close()
        for handle in self.handles:
            handle.finish(kill_after_s=limit_s, report=self._report_waiting)
        self.handles.clear()
        if self.links is not None:
            self.links.close()
            self.links = None

    def _report_waiting(self) -> None:
        LOGGER.warning(
            "rank %d is done and waits for the process of its server to end", self._world.rank
        )

    def forget_in_child(self) -> None:
        """In a forked child: let go of what only the parent may keep alive."""
        for sock in self.sockets:
            sock.close()
        self.pulses.forget_in_child()
        for handle in self.handles:
            if isinstance(handle, ProcessServer):
                handle.forget_in_child()


def parse_address(text: str, what: str) -> tuple[str, int]:
    """What a server has left in the store; raises `RemoteProtocolError`."""
    try:
        address, port = text.split()
        ipaddress.ip_address(address)
        if not 0 < (number := int(port)) < 2**16:
            raise ValueError(f"port {number}")
    except ValueError as error:
        raise RemoteProtocolError(
            f"the store has {text[:100]!r} for the address of {what}: {error}"
        ) from error
    return address, number
