"""A substitute: a server that goes on with the slices of one whose node is gone.

It runs in a thread of the server process on the buddy's node, under the lost server's number, with
connections, machine and store of its own. The survivors connect to it as they did to the lost one,
say what they have, and bring values and optimizer state: see `core.takeover`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from foreprop.config import LOGGER, Config
from foreprop.core.decoding import decoded
from foreprop.core.frames import CONTROL_PRIORITY, Peers
from foreprop.core.manifest import Manifest
from foreprop.core.membership import Members
from foreprop.core.takeover import Settled, Settlement, SliceTakenOver
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, FrameOwner, bounded
from foreprop.link.stream import listen
from foreprop.path.executor import Executor, Host, Machine
from foreprop.path.joining import Composer, Work
from foreprop.path.server import Server

if TYPE_CHECKING:
    from foreprop.path.slicestore import SliceStore
    from foreprop.path.sums import GradientBuffer

_LIMIT_BYTES = 1 << 24
_WAITING_EACH = 4
"""Frames about a slice's state that are kept until it is there, for each rank."""
_LEAVE_S = 3.0
"""Who has left one server of a node leaves the other one, too."""


class Substitution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who takes over from which server, and where."""

    server: int
    """The lost one's number, and the substitute's."""
    node: int
    """Where the substitute is."""
    members: tuple[int, ...]
    """The ranks that go on."""
    session: str
    """The id by which workers greet it."""
    address: str
    port: int
    """0: it is still to be started."""

    def survivors(self, peers: Peers) -> Peers:
        """Of a session's, those who come."""
        return dataclasses.replace(peers, absent=frozenset(range(peers.count)) - set(self.members))


def substitute_id(session: str, server: int, lost: int) -> str:
    """By which workers greet the substitute for a server that was on the lost node."""
    return f"{session}-{server}-{lost}"


_SUBSTITUTION = msgspec.json.Decoder(Substitution)
_CLAIM = msgspec.json.Decoder(tuple[int, ...])
_SETTLED = msgspec.json.Decoder(list[Settled])


def decode_substitution(payload: memoryview) -> Substitution:
    return decoded(_SUBSTITUTION, payload, "word of a substitute")


def decode_settled(payload: memoryview, slices: Sequence[int]) -> dict[int, Settled]:
    """By slice. Raises `RemoteProtocolError` for what is not of these."""
    settled = {each.slice: each for each in decoded(_SETTLED, payload, "what was settled")}
    if settled.keys() != set(slices):
        raise RemoteProtocolError(f"{len(settled)} slices were settled, not these {len(slices)}")
    return settled


def room_for_words(header: Header) -> memoryview:
    return bounded(header, _LIMIT_BYTES)


class Substitutes:
    """Owns the wish for a substitute, which only the worker on its node may have.

    ``index``: this server's number, and its node's; ``session``: its id; ``composer_of`` composes a
    substitute.
    """

    kinds = frozenset({Kind.TAKEOVER})

    def __init__(
        self,
        executor: Executor,
        config: Config,
        members: Members,
        index: int,
        session: str,
        composer_of: Callable[[Substitution], Composer],
    ) -> None:
        self._executor = executor
        self._config = config
        self._members = members
        self._index = index
        self._session = session
        self._composer_of = composer_of
        self._servers: dict[int, Server] = {}
        self._composers: list[_NotedComposer] = []
        self._threads: list[threading.Thread] = []
        self._stopped = False

    @property
    def servers(self) -> list[Server]:
        return list(self._servers.values())

    def room(self, peer: Connection, header: Header) -> memoryview:
        return room_for_words(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        told = decode_substitution(payload)
        peers = self._executor.peers
        self._check(peer, told)
        if self._members.all_left:  # nobody needs one
            return
        listener = listen(told.address, self._config.port_range)
        port = listener.getsockname()[1]
        composer = _NotedComposer(self._composer_of(told))
        with self._executor.lock:
            if self._stopped:  # its own session is over
                listener.close()
                return
            server = Server(
                index=told.server,
                session_id=told.session,
                config=self._config,
                composer=composer,
                world_size=peers.count,
                name=f"server {told.server} (substitute on node {told.node})",
                process=f"server {told.server}",
            )
            thread = threading.Thread(
                target=server.run,
                args=(listener,),
                name=f"foreprop-substitute{told.server}",
                daemon=True,
            )
            self._servers[told.server] = server
            self._composers.append(composer)
            thread.start()
            self._threads.append(thread)
        LOGGER.warning("server %d starts a substitute for server %d", self._index, told.server)
        data = msgspec.json.encode(msgspec.structs.replace(told, port=port))
        about = Header(Kind.TAKEOVER, 0, 0, 0, told.server, CONTROL_PRIORITY, 0)
        for rank in sorted(self._members.ever):  # who is not to come learns that
            self._executor.answer(rank, Kind.TAKEOVER, about, data)

    def _check(self, peer: Connection, told: Substitution) -> None:
        """Its id is in files' names, so no word of a peer's is taken for it."""
        nodes = range(self._executor.peers.count)
        if not peer.number == told.node == self._index or told.server in self._servers:
            raise RemoteProtocolError(
                f"rank {peer.number} wants a substitute for server {told.server} on node"
                f" {told.node}, out of turn"
            )
        if not set(told.members) <= set(nodes) or peer.number not in told.members:
            raise RemoteProtocolError(f"a substitute for ranks {list(told.members[:100])}")
        if told.session not in {substitute_id(self._session, told.server, lost) for lost in nodes}:
            raise RemoteProtocolError(f"a substitute with the id {told.session[:100]!r}")

    def stop(self, *, failed: bool) -> None:
        """The session is over here: its workers have left the substitutes, or are about to."""
        with self._executor.lock:
            self._stopped = True
        deadline = time.monotonic() + (0.0 if failed else _LEAVE_S)
        for thread, composer in zip(self._threads, self._composers, strict=True):
            if composer.has_composed:  # nobody needs one that all had not joined by now
                thread.join(max(0.0, deadline - time.monotonic()))
        for server in self._servers.values():
            server.cancel()
        for thread in self._threads:
            thread.join()


class _NotedComposer:
    """Another one, and whether all have joined what it was to compose."""

    def __init__(self, inner: Composer) -> None:
        self.peers, self.why_not = inner.peers, inner.why_not
        self.has_composed = False
        self._inner = inner

    def compose(
        self, manifest: Manifest, host: Host, connections: Mapping[int, Connection]
    ) -> Work:
        self.has_composed = True
        return self._inner.compose(manifest, host, connections)


class DeferredStates:
    """Owns optimizer state that workers send and ask for: what comes before the buddy's waits.

    Of a slice's pushes that is so by itself (`core.takeover`).
    """

    kinds = frozenset({Kind.STATE, Kind.STATE_PULL})

    def __init__(self, executor: Executor, inner: FrameOwner, slices: Sequence[int]) -> None:
        self._lock = executor.lock
        self._inner = inner
        self._most = _WAITING_EACH * executor.peers.count
        self._waiting: dict[int, list[tuple[Connection, Header, memoryview]]] = {
            slice_: [] for slice_ in slices
        }

    def room(self, peer: Connection, header: Header) -> memoryview:
        return self._inner.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        with self._lock:
            if header.slice in self._waiting:
                waiting = self._waiting[header.slice]
                if len(waiting) == self._most:
                    raise RemoteProtocolError(
                        f"more than {self._most} frames about the state of slice {header.slice},"
                        " which is not here"
                    )
                waiting.append((peer, header, payload))
            else:
                self._inner.on_frame(peer, header, payload)

    def adopted(self, slice_: int) -> None:
        """The buddy's is here. With the lock held."""
        for waiting in self._waiting.pop(slice_, []):
            self._inner.on_frame(*waiting)


class Adoption:
    """Owns what survivors bring to a substitute: claims, values and optimizer state."""

    kinds = frozenset({Kind.CLAIM, Kind.TAKEN_OVER, Kind.STATE_TAKEN_OVER})

    def __init__(
        self,
        machine: Machine,
        executor: Executor,
        store: SliceStore,
        slices: Sequence[int],
        told: Substitution,
        states: DeferredStates,
    ) -> None:
        self._states = states
        self._machine = machine
        self._executor = executor
        self._lock = executor.lock
        self._store = store
        self._told = told
        self._settlement = Settlement(slices, told.members, buddy=told.node)
        self._settled: dict[int, Settled] = {}
        self._incoming: dict[int, GradientBuffer] = {}  # by peer

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.CLAIM:
            return bounded(header, _LIMIT_BYTES)
        slice_ = header.slice
        settled = self._settled.get(slice_)
        giver = self._told.node
        if settled is not None and header.kind == Kind.TAKEN_OVER:
            giver = settled.giver
        if settled is None or peer.number != giver:
            raise RemoteProtocolError(
                f"rank {peer.number} sent {Kind(header.kind).name} of slice {slice_}, out of turn"
            )
        if header.kind == Kind.STATE_TAKEN_OVER:
            return bounded(header, self._store.state_limit_bytes(slice_))
        with self._lock:
            buffer = self._store.take_buffer(slice_, value=True)
        if len(buffer.view) != header.payload_bytes or header.step != settled.step:
            raise RemoteProtocolError(
                f"rank {peer.number} sent {header.payload_bytes} bytes of slice {slice_} after"
                f" step {header.step}, not {len(buffer.view)} after {settled.step}"
            )
        self._incoming[peer.number] = buffer
        return buffer.view

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.CLAIM:
            self._on_claim(peer, payload)
        elif header.kind == Kind.STATE_TAKEN_OVER:
            with self._lock:
                if payload:
                    self._store.import_state(header.slice, payload)
                self._states.adopted(header.slice)
        else:
            self._on_values(peer, header)

    def _on_claim(self, peer: Connection, payload: memoryview) -> None:
        steps = decoded(_CLAIM, payload, "a claim")
        with self._lock:
            settled = self._settlement.add(peer.number, steps)
            self._settled = {each.slice: each for each in settled}
            if self._settlement.missing:
                return
        data = msgspec.json.encode(settled)
        about = Header(Kind.SETTLED, 0, 0, 0, 0, CONTROL_PRIORITY, 0)
        for rank in self._told.members:
            self._executor.answer(rank, Kind.SETTLED, about, data)

    def _on_values(self, peer: Connection, header: Header) -> None:
        slice_, settled = header.slice, self._settled[header.slice]
        event = SliceTakenOver(slice_, settled.step, header.priority, settled.owed)
        with self._lock:
            self._store.put_value(slice_, self._incoming.pop(peer.number))
            self._store.install_value(slice_)
            instructions = self._machine.handle(event)
        self._executor.execute(instructions)
