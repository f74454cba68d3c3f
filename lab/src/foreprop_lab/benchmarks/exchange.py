"""What TCP makes of the lab's links: every node sends to every other one, and nothing waits.

The yardstick for many nodes. A parameter server beside each worker exchanges as many bytes between
the same nodes, but its messages depend on each other; these do not.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from foreprop.config import Config
from foreprop.engine.stream import tune
from foreprop.errors import ConfigError
from foreprop.plan.limit import HEADER_FACTOR
from foreprop_lab.lab.cluster import Cluster
from foreprop_lab.lab.network import NetworkUnavailable
from foreprop_lab.setting.links import Network

_PORT = 29700
_SCALE = 16
"""The kernel's buffers are divided by what the lab's figures divide the models' arrays by."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """``node_bytes`` leave each node, in messages that go to each other node in parallel.

    Raises `ConfigError` for what cannot be.
    """

    nodes: int
    rate_bits_per_s: float
    node_bytes: int
    message_bytes: int

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ConfigError(f"nodes is {self.nodes}; at least 2")
        if self.rate_bits_per_s <= 0:
            raise ConfigError(f"rate is {self.rate_bits_per_s} bit/s; it must be positive")
        if not 0 < self.message_bytes <= self.peer_bytes:
            raise ConfigError(
                f"a message has {self.message_bytes} bytes; each node gets {self.peer_bytes}"
            )

    @property
    def peer_bytes(self) -> int:
        return self.node_bytes // (self.nodes - 1)

    @property
    def ideal_s(self) -> float:
        """Seconds at the links' rate, headers counted."""
        sent_bytes = self.peer_bytes * (self.nodes - 1)
        return HEADER_FACTOR * sent_bytes * 8 / self.rate_bits_per_s


def measure_exchange(exchange: Exchange, *, rounds: int) -> float:
    """Seconds until the last node has everything, the median over rounds after a first one.

    Raises `ConfigError` where the lab cannot make links.
    """
    network = Network(
        nodes=exchange.nodes, rate_bits_per_s=exchange.rate_bits_per_s, buffer_scale=_SCALE
    )
    try:
        cluster = Cluster(_serve, (exchange, network), nodes=exchange.nodes, network=network)
    except NetworkUnavailable as error:
        raise ConfigError(f"this needs links made by the kernel: {error}") from error
    with cluster:
        for stage in ("listen", "connect", "exchange"):
            cluster.ask_all(stage)
        slowest_s: list[float] = [max(cluster.ask_all("exchange")) for _ in range(rounds)]
    return statistics.median(slowest_s)


def _serve(node: int, connection: Connection, argument: tuple[Exchange, Network]) -> None:
    peer = _Peer(node, *argument)
    while True:
        connection.send(getattr(peer, connection.recv())())


class _Peer:
    """One node's sockets: one to send by and one to receive by for each other node."""

    def __init__(self, node: int, exchange: Exchange, network: Network) -> None:
        self._node = node
        self._exchange = exchange
        self._network = network
        self._outgoing: list[socket.socket] = []
        self._incoming: list[socket.socket] = []

    def listen(self) -> None:
        address = (self._network.address(self._node), _PORT)
        self._listener = socket.create_server(address, backlog=self._exchange.nodes)

    def connect(self) -> None:
        unsent_bytes = Config().unsent_bytes // _SCALE
        for other in range(self._exchange.nodes):
            if other != self._node:
                sock = socket.create_connection((self._network.address(other), _PORT), _TIMEOUT_S)
                tune(sock, unsent_bytes=unsent_bytes, timeout_s=_TIMEOUT_S)
                sock.settimeout(None)
                self._outgoing.append(sock)
        self._incoming = [self._listener.accept()[0] for _ in self._outgoing]

    def exchange(self) -> float:
        """Seconds from the first message to the last."""
        started = time.monotonic()
        threads = [*_threads(self._send, self._outgoing), *_threads(self._receive, self._incoming)]
        for thread in threads:
            thread.join()
        return time.monotonic() - started

    def _send(self, sock: socket.socket) -> None:
        message = memoryview(bytes(self._exchange.message_bytes))
        left = self._exchange.peer_bytes
        while left > 0:
            sock.sendall(message[:left])
            left -= len(message)

    def _receive(self, sock: socket.socket) -> None:
        message = memoryview(bytearray(self._exchange.message_bytes))
        left = self._exchange.peer_bytes
        while left > 0:
            received = sock.recv_into(message[:left], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("a node of the exchange has ended")
            left -= received


def _threads(
    work: Callable[[socket.socket], None], sockets: Iterable[socket.socket]
) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(sock,), daemon=True) for sock in sockets]
    for thread in threads:
        thread.start()
    return threads
