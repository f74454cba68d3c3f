"""A server's start: peers say who they are, and work begins when all have said the same."""

from __future__ import annotations

import abc
import hmac
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from foreprop.config import Config
from foreprop.config.plugins import HOW
from foreprop.core.agreement import decode_manifest, describe_mismatch
from foreprop.core.frames import Peers
from foreprop.core.manifest import NO_GROUP, Manifest
from foreprop.core.sendqueue import takes_turns, window_share_bytes
from foreprop.core.wire import MAX_CONTROL_BYTES, Header, Kind
from foreprop.engine.calls import Waits
from foreprop.engine.connection import Connection, FailureReports, Service, bounded
from foreprop.engine.executor import Executor, Host
from foreprop.engine.optimizer import maybe_served
from foreprop.engine.stream import Stream
from foreprop.errors import Failure, RemoteProtocolError
from foreprop.version import __version__


class GreetingRefused(RemoteProtocolError):
    """A greeting that does not fit the session: told on its connection, and to nobody else."""


class Reception:
    """The peers that have greeted a server, by rank; others are at the `entrance.Entrance`.

    Callers hold the server's lock. ``world_size`` is of the ranks that there may be, if that is
    known before the first manifest.
    """

    def __init__(self, session_id: str, world_size: int | None) -> None:
        self._session_id = session_id.encode()
        self._world_size = world_size
        self.greeted: dict[int, Connection] = {}  # also those that have joined

    def greet(
        self, peer: Connection, header: Header, payload: memoryview, work: Work | None
    ) -> None:
        """Give a rank to a peer that knows the session; raises `RemoteProtocolError`.

        ``work`` is that of a session that has begun.
        """
        if not hmac.compare_digest(payload, self._session_id):
            raise RemoteProtocolError(f"HELLO for another session: {bytes(payload[:40])!r}")
        rank = header.rank
        if work is not None and work.newcomers is None:
            raise GreetingRefused(f"rank {rank} says hello and the session has begun without it")
        if self._world_size is not None and rank >= self._world_size:
            raise GreetingRefused(f"rank {rank} of {self._world_size}")
        before = self.greeted.get(rank)
        if work is not None and work.newcomers is not None:
            work.newcomers.check_place(rank)
            before = None if before is not None and before.left and before.ended else before
        if before is not None:
            raise GreetingRefused(f"two workers say that they are rank {rank}")
        self.greeted[rank] = peer
        peer.rank = rank

    def check_world_size(self, peer: Connection, world_size: int) -> None:
        """Check a manifest's number of workers before anything is computed from it."""
        expected = self._world_size
        if expected is not None and world_size != expected:
            raise GreetingRefused(
                f"rank {peer.rank} of {world_size} in a world of {expected} (WORLD_SIZE, or"
                " max_workers)"
            )

    def forget(self, peer: Connection) -> None:
        """Free the place of a peer whose connection has ended before it joined."""
        if self.greeted.get(peer.rank) is peer:
            del self.greeted[peer.rank]


StreamWrapper = Callable[[Stream, int], Stream]
"""Puts an emulated link around the stream to a rank, if there is one."""


class Admitting(Protocol):
    """Decides who may come to a session that has started, to a free place. Any thread."""

    def directory(self) -> bytes:
        """Where the servers are and whose places are free, for who asks."""

    def check_place(self, rank: int) -> None:
        """Raise `GreetingRefused` if a rank's place is not free. With the lock held."""

    def check_manifest(self, rank: int, manifest: Manifest) -> None:
        """Raise `GreetingRefused`, with both sides' values, for what does not fit."""

    def welcome(self, peer: Connection) -> None:
        """Take in a peer that has its number, and may ask to be counted."""


class Work(abc.ABC):
    """What a server or relay does in a session that has started.

    ``owners`` has the service of each kind of frame; ``names`` has the parameter of each slice or
    shard.
    """

    def __init__(
        self,
        owners: Mapping[int, Service],
        names: Sequence[str],
        executor: Executor,
        waits: Waits,
    ) -> None:
        self.owners = owners
        self.names = names
        self._executor = executor
        self.incomplete = waits.incomplete

    @property
    def newcomers(self) -> Admitting | None:
        """What takes in who comes later; None if nobody may."""
        return None

    @abc.abstractmethod
    def start(self) -> None:
        """Begin: all peers have said the same hello."""

    def lose(self, peer: Connection, failure: Failure) -> bool:
        """Whether the session goes on without this worker, which then is told so."""
        return False

    def look(self) -> None:  # noqa: B027 - most see nothing
        """Do what is due now and then, in the server's own thread."""

    @abc.abstractmethod
    def close(self, failure: Failure | None) -> None:
        """Let go of all that is not the server's own: the session is over."""

    def stop(self) -> None:
        """End the sending threads: the session is over, and all connections are closed."""
        self._executor.stop()


class Composer(Protocol):
    """Puts the work of a session together, of the features that its manifest asks for."""

    def peers(self, manifest: Manifest) -> Peers:
        """The peers that are to come."""

    def why_not(self, manifest: Manifest) -> str | None:
        """Why this process cannot do the work; None if it can."""

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
        """The peers that are to come, once the first has said so."""
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
        self._members: dict[int, Service] = dict.fromkeys(reports.kinds, reports)
        self.owners: dict[int, Service] = dict.fromkeys(self.kinds, self) | self._members
        """The owners of frames from peers that have greeted and not joined."""

    # Frames.
    def greet(self, peer: Connection, header: Header, payload: memoryview) -> bool:
        """Take a first frame, which the entrance has read; raises `RemoteProtocolError`.

        Returns whether the peer stays: who only asks where servers are is told, and goes.
        """
        if header.kind == Kind.SERVERS:
            if self.work is None or self.work.newcomers is None:
                begun = "has not begun" if self.work is None else "takes in nobody (elastic=True)"
                raise GreetingRefused(f"rank {header.rank} wants to join, and the session {begun}")
            peer.send_past_queue(Kind.SERVERS, self.work.newcomers.directory())
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
        """Whether the session goes on without a peer that is gone, or is to go."""
        return peer.joined and self.work is not None and self.work.lose(peer, failure)

    def look(self) -> None:
        if self.work is not None:
            self.work.look()

    def end(self) -> Work | None:
        """Let nobody join any more, whom nobody would close; returns the work to be closed."""
        with self._host.lock:
            self._is_over = True
            return self.work

    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        """The error for a frame that comes too early, or from a peer that has not joined."""
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
            self._admit_newcomer(peer, manifest, number, self.work, self.work.newcomers)
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
                self._bound(zero, self._connections.values())
                work = self.work = self._composer.compose(zero, self._host, self._connections)
                for each in self._connections.values():
                    each.owners = {**self._members, **work.owners}
        if refused:
            self._host.fail(Failure(kind="HandshakeError", message=refused))
        elif work is not None:  # not `self.work`: another thread may have made that by now
            work.start()

    def _admit_newcomer(
        self, peer: Connection, manifest: Manifest, number: int, work: Work, newcomers: Admitting
    ) -> None:
        """Give a newcomer a free place, if its manifest is like all others'."""
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

    def _compare_all(self, zero: Manifest, number: int) -> str | None:
        """How the first peer differs from another, or from this process; None if it does not."""
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
    """The error for an optimizer that servers do not apply; None if they do.

    ``by_rows`` names those that update tables.
    """
    name = manifest.optimizer.name
    for info in manifest.parameters:
        is_known = name in by_rows if info.rows else maybe_served(name) is not None
        if info.group != NO_GROUP and not is_known:
            return f"optimizer {name!r} is not one that servers apply. If it is yours, {HOW}"
    return None
