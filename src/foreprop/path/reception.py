"""Who comes to a server: a stranger gets a few bytes and seconds until it has greeted.

A greeting (`core.wire.Kind.HELLO`) is the session's id and the sender's rank. It is small and sent
at once, so that nothing larger is read, and nothing decoded, for somebody who does not know the
session. What the session is about, the manifest, comes in the next frame, whatever its size.
"""

from __future__ import annotations

import hmac
import time

from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.wire import Header, Kind, encode_header
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection

MAX_GREETING_BYTES = 256
GREETING_S = 10.0
"""A worker greets as soon as it is connected."""
MAX_STRANGERS = 64
"""At one time; each has a thread, for `GREETING_S` at most."""


class GreetingRefused(RemoteProtocolError):
    """A greeting that does not fit the session: told on its connection, and to nobody else."""


def greeting(session_id: str, rank: int) -> bytes:
    """The first frame on a connection to a server or relay."""
    data = session_id.encode()
    return encode_header(Kind.HELLO, 0, rank, 0, 0, CONTROL_PRIORITY, len(data)) + data


class Reception:
    """Those who have connected to a server and are not workers of its session yet, or for ever.

    Whoever calls holds the server's lock. ``world_size``: if it is known before the first manifest.
    """

    def __init__(self, session_id: str, world_size: int | None, join_limit_s: float) -> None:
        self._session_id = session_id.encode()
        self._world_size = world_size
        self._limit_s = min(GREETING_S, join_limit_s)
        self._strangers: dict[Connection, None] = {}  # in the order in which they came
        self._greeted: dict[int, Connection] = {}  # by rank, also those that have joined

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def arrived(self, peer: Connection) -> Connection | None:
        """One more; returns the one that must go for it, the oldest, if there are too many."""
        self._strangers[peer] = None
        if len(self._strangers) <= MAX_STRANGERS:
            return None
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        return oldest

    def greet(self, peer: Connection, header: Header, payload: memoryview, *, begun: bool) -> None:
        """It knows the session: from now on it has a rank. Raises `RemoteProtocolError`."""
        if peer.rank >= 0:
            raise RemoteProtocolError("a second HELLO on one connection")
        if not hmac.compare_digest(payload, self._session_id):
            raise RemoteProtocolError(f"HELLO for another session: {bytes(payload[:40])!r}")
        rank = header.rank
        if begun:
            raise GreetingRefused(f"rank {rank} says hello and the session has begun without it")
        if self._world_size is not None and rank >= self._world_size:
            raise GreetingRefused(f"rank {rank} of {self._world_size}")
        if rank in self._greeted:
            raise GreetingRefused(f"two workers say that they are rank {rank}")
        self._strangers.pop(peer, None)
        self._greeted[rank] = peer
        peer.rank = rank

    def check_world_size(self, peer: Connection, world_size: int) -> None:
        """Of its manifest, before anything is computed from it."""
        expected = self._world_size
        if expected is not None and world_size != expected:
            raise GreetingRefused(f"rank {peer.rank} of {world_size} in a world of {expected}")

    def forget(self, peer: Connection) -> None:
        """Its connection has ended before it has joined."""
        self._strangers.pop(peer, None)
        if self._greeted.get(peer.rank) is peer:
            del self._greeted[peer.rank]

    def silent(self) -> list[Connection]:
        """Strangers that have said nothing for too long."""
        since_s = time.monotonic() - self._limit_s
        return [peer for peer in self._strangers if peer.connected_at_s < since_s]

    def everybody(self) -> list[Connection]:
        return [*self._strangers, *self._greeted.values()]
