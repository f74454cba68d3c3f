"""The start of a server: peers say who they are, and when all have said the same, work begins."""

from __future__ import annotations

import hmac
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from foreprop.config import Config
from foreprop.core.agreement import decode_manifest, describe_mismatch
from foreprop.core.frames import Peers
from foreprop.core.manifest import NO_GROUP, Manifest
from foreprop.core.sendqueue import takes_turns, window_share_bytes
from foreprop.core.wire import MAX_CONTROL_BYTES, Header, Kind
from foreprop.errors import Failure, RemoteProtocolError
from foreprop.link.connection import Connection, FailureReports, FrameOwner, bounded
from foreprop.link.stream import Stream
from foreprop.path.executor import Host
from foreprop.path.optimizer import maybe_served
from foreprop.version import __version__


class GreetingRefused(RemoteProtocolError):
    """A greeting that does not fit the session: told on its connection, and to nobody else."""


class Reception:
    """Those who have greeted a server, by rank. Who has not is at the `entrance.Entrance`.

    Whoever calls holds the server's lock. ``world_size``: of ranks that there may be, if that is
    known before the first manifest.
    """

    def __init__(self, session_id: str, world_size: int | None) -> None:
        self._session_id = session_id.encode()
        self._world_size = world_size
        self._greeted: dict[int, Connection] = {}  # also those that have joined

    def greet(
        self, peer: Connection, header: Header, payload: memoryview, work: Work | None
    ) -> None:
        """It knows the session: from now on it has a rank. Raises `RemoteProtocolError`.

        ``work``: of a session that has begun.
        """
        if not hmac.compare_digest(payload, self._session_id):
            raise RemoteProtocolError(f"HELLO for another session: {bytes(payload[:40])!r}")
        rank = header.rank
        if work is not None and work.newcomers is None:
            raise GreetingRefused(f"rank {rank} says hello and the session has begun without it")
        if self._world_size is not None and rank >= self._world_size:
            raise GreetingRefused(f"rank {rank} of {self._world_size}")
        before = self._greeted.get(rank)
        if work is not None and work.newcomers is not None:
            work.newcomers.check_place(rank)
            before = None if before is not None and before.left and before.ended else before
        if before is not None:
            raise GreetingRefused(f"two workers say that they are rank {rank}")
        self._greeted[rank] = peer
        peer.rank = rank

    def check_world_size(self, peer: Connection, world_size: int) -> None:
        """Of its manifest, before anything is computed from it."""
        expected = self._world_size
        if expected is not None and world_size != expected:
            raise GreetingRefused(
                f"rank {peer.rank} of {world_size} in a world of {expected} (WORLD_SIZE, or"
                " max_workers)"
            )

    def forget(self, peer: Connection) -> None:
        """Its connection has ended before it has joined."""
        if self._greeted.get(peer.rank) is peer:
            del self._greeted[peer.rank]

    def maybe(self, rank: int) -> Connection | None:
        """None: it has not greeted."""
        return self._greeted.get(rank)

    def everybody(self) -> list[Connection]:
        return list(self._greeted.values())


StreamWrapper = Callable[[Stream, int], Stream]
"""Puts an emulated link around the stream to a rank, if there is one."""


class Admitting(Protocol):
    """Who may come to a session that has started, in a place that is free. Any thread."""

    def whereabouts(self) -> bytes:
        """Where its servers are, and whose places are free, for who asks."""

    def check_place(self, rank: int) -> None:
        """Raises `GreetingRefused` if the rank is not free. With the lock held."""

    def check_manifest(self, rank: int, manifest: Manifest) -> None:
        """Raises `GreetingRefused`, with both sides' values, for what does not fit."""

    def welcome(self, peer: Connection) -> None:
        """It has its number, and may ask to be counted."""


class Work(Protocol):
    """What a server or relay does in a session that has started."""

    @property
    def newcomers(self) -> Admitting | None:
        """None: nobody may come later."""

    @property
    def owners(self) -> Mapping[int, FrameOwner]:
        """By kind, who handles the peers' frames."""

    @property
    def names(self) -> Sequence[str]:
        """The parameters', by number of the slice or shard."""

    def start(self) -> None:
        """All peers have said the same hello."""

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        """(slice, step, what it waits for) of what some peers have pushed and others not."""

    def lose(self, peer: Connection, failure: Failure) -> bool:
        """Whether the session goes on without this worker, which then is told so."""

    def look(self) -> None:
        """Now and then, in the server's own thread."""

    def close(self, failure: Failure | None) -> None:
        """The session is over: let go of all that is not the server's own."""

    def stop(self) -> None:
        """After it, when all connections are closed: end the sending threads."""


class Composer(Protocol):
    """Puts the work of a session together, of the features that its manifest asks for."""

    def peers(self, manifest: Manifest) -> Peers:
        """Who is to come."""

    def why_not(self, manifest: Manifest) -> str | None:
        """Why it cannot be done, if so."""

    def compose(
        self, manifest: Manifest, host: Host, connections: Mapping[int, Connection]
    ) -> Work: ...


class Joining:
    """Owns greetings and manifests. ``connections`` are filled as peers join, by number.

    Any thread; the host's lock is held where several of them meet.
    """

    kinds = frozenset({Kind.HELLO, Kind.MANIFEST})

    def __init__(
        self,
        host: Host,
        name: str,
        composer: Composer,
        reception: Reception,
        config: Config,
        wrap: StreamWrapper | None,
        session_id: str,
        connections: dict[int, Connection],
    ) -> None:
        self.known: Peers | None = None
        """Who is to come, once the first has said so."""
        self.work: Work | None = None
        self._host = host
        self._name = name
        self._composer = composer
        self._reception = reception
        self._config = config
        self._wrap = wrap
        self._session_id = session_id
        self._connections = connections
        self._manifests: dict[int, Manifest] = {}
        self._is_over = False
        reports = FailureReports(self._on_failure)
        self._members: dict[int, FrameOwner] = dict.fromkeys(reports.kinds, reports)
        self.owners: dict[int, FrameOwner] = dict.fromkeys(self.kinds, self) | self._members
        """Of the frames of who has greeted and not joined."""

    # Frames.
    def greet(self, peer: Connection, header: Header, payload: memoryview) -> bool:
        """The first one, which the entrance has read; raises `RemoteProtocolError`.

        Returns whether it stays: who only asks where servers are is told, and goes.
        """
        if header.kind == Kind.SERVERS:
            if self.work is None or self.work.newcomers is None:
                begun = "has not begun" if self.work is None else "takes in nobody (elastic=True)"
                raise GreetingRefused(f"rank {header.rank} wants to join, and the session {begun}")
            peer.send_past_queue(Kind.SERVERS, self.work.newcomers.whereabouts())
            return False
        with self._host.lock:
            self._reception.greet(peer, header, payload, self.work)
        return True

    def room(self, peer: Connection, header: Header) -> memoryview:
        begun = self.work is not None and self.work.newcomers is None
        if peer.joined or begun:
            raise self.refusal(peer, header)
        return bounded(header, MAX_CONTROL_BYTES if header.kind == Kind.MANIFEST else 0)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.HELLO:
            raise RemoteProtocolError("a second HELLO on one connection")
        self._on_manifest(peer, decode_manifest(payload))

    def _on_failure(self, peer: Connection, failure: Failure) -> None:
        if self.work is not None and not peer.joined:
            raise GreetingRefused(f"rank {peer.rank} does not join: {failure.message}")
        if not self.goes_on_without(peer, failure):
            peer.left = True
            self._host.fail(failure)

    def goes_on_without(self, peer: Connection, failure: Failure) -> bool:
        """Of one that is gone, or is to go."""
        return peer.joined and self.work is not None and self.work.lose(peer, failure)

    def look(self) -> None:
        """Now and then, in the server's own thread."""
        if self.work is not None:
            self.work.look()

    def end(self) -> Work | None:
        """What is there to be closed. From now on nobody joins: nobody would close what begins."""
        with self._host.lock:
            self._is_over = True
            return self.work

    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        """Of what a peer says before the session has started, or without having joined it."""
        if self.work is None:
            kind = Kind(header.kind).name
            return RemoteProtocolError(f"{kind} before the session has started")
        return GreetingRefused(f"the session has begun without rank {peer.rank}")

    # The start.
    def _on_manifest(self, peer: Connection, manifest: Manifest) -> None:
        if manifest.session != self._session_id:
            raise RemoteProtocolError(f"HELLO for another session: {manifest.session!r}")
        self._reception.check_world_size(peer, manifest.most_workers)
        if peer.rank >= manifest.most_workers or not manifest.parameters:
            raise RemoteProtocolError(f"rank {peer.rank} of {manifest.most_workers}")
        peers = self._composer.peers(manifest)
        number = peers.number_of(peer.rank)
        if self.work is not None and self.work.newcomers is not None:
            self._take_in(peer, manifest, number, self.work, self.work.newcomers)
            return
        if number in peers.absent:
            raise GreetingRefused(f"rank {peer.rank} is not one of {peers.names(peers.present)}")
        with self._host.lock:
            if self._is_over:
                raise GreetingRefused(f"the session has ended without rank {peer.rank}")
            if number in self._connections:
                raise GreetingRefused(f"two workers say that they are rank {peer.rank}")
            peer.number = number
            if self._wrap is not None:
                peer.stream = self._wrap(peer.stream, peer.rank)
            self._connections[number] = peer
            self._manifests[number] = manifest
            first = self._composer.peers(manifest).present[0]
            zero = self._manifests.get(first)
            if zero is None:
                return
            self.known = self._composer.peers(zero)
            refused = self._compare_all(zero, first)
            work = None
            if not refused and len(self._connections) == len(self.known.present):
                work = self._begin(zero)
        if refused:
            self._host.fail(Failure(kind="HandshakeError", message=refused))
        elif work is not None:  # not `self.work`: another thread may have made that by now
            work.start()

    def _take_in(
        self, peer: Connection, manifest: Manifest, number: int, work: Work, newcomers: Admitting
    ) -> None:
        """In a place that is free, if it says the same as all others have said."""
        newcomers.check_manifest(peer.rank, manifest)
        with self._host.lock:
            newcomers.check_place(number)
            peer.number = number
            self._connections[number] = peer
            self._bound(manifest, [peer])
            peer.owners = {**self._members, **work.owners}
        newcomers.welcome(peer)

    def _bound(self, manifest: Manifest, connections: Iterable[Connection]) -> None:
        order, peers = manifest.knobs.order, len(self._connections)
        if manifest.knobs.lanes == "peers" and takes_turns(order, peers):
            window_bytes = window_share_bytes(self._config.push_window_bytes, peers, order)
            for peer in connections:
                peer.stream.bound(window_bytes)

    def _begin(self, manifest: Manifest) -> Work:
        self._bound(manifest, self._connections.values())
        self.work = self._composer.compose(manifest, self._host, self._connections)
        for peer in self._connections.values():
            peer.owners = {**self._members, **self.work.owners}
        return self.work

    def _compare_all(self, zero: Manifest, number: int) -> str | None:
        """How the first peer and the others, or this process, differ."""
        why_not = self._composer.why_not(zero)
        if why_not is not None:
            return why_not
        first = f"rank {self._connections[number].rank}"
        ours = (__version__, torch.__version__.partition("+")[0], sys.byteorder)
        theirs = (zero.foreprop, zero.torch, zero.byteorder)
        for name, mine, other in zip(("foreprop", "torch", "byteorder"), ours, theirs, strict=True):
            if mine != other:
                us, values = self._name, f"{first} has {other!r}, {self._name} {mine!r}"
                return f"{first} and {us} do not agree: {name}: {values}"
        for number, manifest in self._manifests.items():
            them = f"rank {self._connections[number].rank}"
            text = describe_mismatch(zero, manifest, us=first, them=them)
            if text is not None:
                return f"{first} and {them} do not agree: {text}"
        return None


def unknown_optimizer(manifest: Manifest, by_rows: Collection[str] = ()) -> str | None:
    """What to say of an optimizer that servers do not apply; ``by_rows`` are those for rows."""
    name = manifest.optimizer.name
    for info in manifest.parameters:
        is_known = name in by_rows if info.rows else maybe_served(name) is not None
        if info.group != NO_GROUP and not is_known:
            from foreprop.config.plugins import HOW

            return f"optimizer {name!r} is not one that servers apply. If it is yours, {HOW}"
    return None
