"""A newcomer's way into a running session: it asks where its servers are, and when it may count.

Nothing of it needs the rendezvous, which may have gone with rank 0. See `core.newcomers`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from foreprop.config import LOGGER, Config
from foreprop.config.joinaddress import parse_addresses
from foreprop.core.authentication import QUESTION, ConnectingSide
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.manifest import BUFFERS_BLOB, FROZEN_BLOB
from foreprop.core.newcomers import BEGUN_STEPS, JoinBid
from foreprop.core.wire import FrameReader, Header, Kind
from foreprop.elastic.admission import Arrival, decode_answer
from foreprop.elastic.whereabouts import LIMIT_BYTES, Whereabouts, decode_whereabouts
from foreprop.errors import (
    ConfigError,
    HandshakeError,
    RemoteProtocolError,
    StepTimeout,
    TransportError,
    decode_failure,
)
from foreprop.gradients.averaged import AveragedParameter
from foreprop.hooks.modelhooks import unpack_into
from foreprop.link.connection import Connection, FrameOwner, bounded, nothing, unencrypted
from foreprop.link.stream import connect, load_checksum
from foreprop.path.parameter import SynchronisedParameter
from foreprop.path.pending import make_pending
from foreprop.quantities import counted
from foreprop.servers.surviving import greet_at

if TYPE_CHECKING:
    from foreprop.cluster.world import World
    from foreprop.path.managedparameter import ManagedParameter
    from foreprop.path.worker import WorkerEngine
    from foreprop.servers.launch import Connections
    from foreprop.servers.served import ServedBackend

_AGAIN_S = 0.2
_ANSWER_S = 5.0
"""A server answers at once where the others are."""


# Where they are.
def connect_to_all(connections: Connections, world: World, config: Config) -> None:
    """Connect to all servers of the session, when this rank's place is free at each of them.

    Raises `HandshakeError` if it is not within ``join_timeout_s``, or for another cluster, and
    `ConfigError` for a rank that there cannot be.
    """
    _check_rank(world, config)
    found = _find(world.rank, config, connections)
    connections.session_id, connections.places = found.session, list(found.places)
    connections.lost = [number for number, place in enumerate(found.places) if place.is_lost]
    for server, place in enumerate(found.places):
        about = (server, place.session, place.host, place.port)
        stream = (
            EndedStream() if place.is_lost else greet_at(connections, config, world.rank, *about)
        )
        connections.streams.append(stream)


def _check_rank(world: World, config: Config) -> None:
    most = max(world.size, config.max_workers or 0)
    if world.rank < most:
        return
    more = f", or of one of those that may come, {world.size} to {most - 1}"
    raise ConfigError(
        f"RANK is {world.rank}, WORLD_SIZE {world.size} and max_workers {config.max_workers}: a"
        f" newcomer has the RANK of a worker that was lost{more if most > world.size else ''}"
    )


def _find(rank: int, config: Config, connections: Connections) -> Whereabouts:
    deadline = time.monotonic() + config.join_timeout_s
    while True:
        try:
            found = _ask_one_of(rank, config)
            _check_shape(found, config, connections)
            taken = _where_taken(rank, config, found)
            if not taken:
                return found
            error: Exception = HandshakeError(taken)
        except TransportError as lost:
            error = lost
        if time.monotonic() >= deadline:
            raise type(error)(f"{error}, for {config.join_timeout_s:g} s (join_timeout_s)")
        time.sleep(_AGAIN_S)


def _ask_one_of(rank: int, config: Config) -> Whereabouts:
    """The first of ``join`` that answers."""
    errors = []
    for host, port in parse_addresses(config.join or ""):
        try:
            return ask(host, port, rank, config)
        except TransportError as error:
            errors.append(str(error))
    raise TransportError(f"rank {rank} wants to join at {config.join} (join): {'; '.join(errors)}")


def _check_shape(found: Whereabouts, config: Config, connections: Connections) -> None:
    servers = len(found.places)
    if not servers:
        raise TransportError("the session that is to be joined is just beginning")
    dedicated = all(place.node < 0 for place in found.places)
    if servers == connections.servers and dedicated == (config.dedicated_servers > 0):
        return
    kind = "dedicated ones" if dedicated else "beside the workers"
    raise HandshakeError(
        f"the session has {counted(servers, 'server')}, {kind}; this worker expects"
        f" {connections.servers}"
        f" (dedicated_servers is {config.dedicated_servers}, WORLD_SIZE gives"
        f" {counted(connections.nodes, 'node')}): start it with the settings of the others"
    )


def _where_taken(rank: int, config: Config, found: Whereabouts) -> str:
    """Why the rank's place is not free at some server; empty if it is."""
    for server, place in enumerate(found.places):
        if not place.is_lost and rank not in ask(place.host, place.port, rank, config).free:
            return (
                f"rank {rank} wants to join, and is in the session, as server {server} sees it: a"
                " newcomer takes the RANK of a worker that was lost, or a new one below max_workers"
            )
    return ""


def ask(host: str, port: int, rank: int, config: Config) -> Whereabouts:
    """Where all servers are; raises `TransportError` if there is no server that answers."""
    sock = connect(host, port, timeout_s=1.0)
    try:
        if config.secret_file is not None:
            _prove(sock, rank, config)
        sock.settimeout(_ANSWER_S)
        sock.sendall(unencrypted(Kind.SERVERS, rank))
        return _read_answer(sock, f"{host} port {port}")
    except OSError as error:
        raise TransportError(f"{host} port {port} does not answer: {error}") from error
    finally:
        sock.close()


def _prove(sock: socket.socket, rank: int, config: Config) -> None:
    import secrets

    from foreprop.core.authentication import NONCE_BYTES
    from foreprop.link.secret import load_key, prove, secret_file_of

    key = load_key(secret_file_of(config))
    side = ConnectingSide(key, QUESTION, rank, secrets.token_bytes(NONCE_BYTES))
    prove(sock, side, time.monotonic() + _ANSWER_S, lambda: None)


def _read_answer(sock: socket.socket, where: str) -> Whereabouts:
    reader = FrameReader(lambda header: bounded(header, LIMIT_BYTES), load_checksum())
    while received := sock.recv_into(reader.buffer):
        frame = reader.advance(received)
        if frame is None:
            continue
        if frame.header.kind == Kind.FAILURE:
            raise TransportError(decode_failure(frame.payload).message)
        if frame.header.kind != Kind.SERVERS:
            raise RemoteProtocolError(f"{where} answers with {Kind(frame.header.kind).name}")
        return decode_whereabouts(frame.payload)
    raise TransportError(f"{where} closed the connection: no server of a running session")


class EndedStream:
    """In the place of a connection to a server that was lost before."""

    checksum = None

    def send(self, header: bytes, payload: memoryview) -> None:
        raise TransportError("the server was lost before this worker came")

    def receive_into(self, view: memoryview) -> int:
        return 0

    def bound(self, window_bytes: int) -> None:
        """Nothing leaves."""

    def close(self) -> None:
        """There is nothing to be closed."""


# Into it.
class Entry:
    """Owns the servers' answers to a newcomer, until it counts."""

    kinds = frozenset({Kind.WELCOME, Kind.JOIN})

    def __init__(self, engine: WorkerEngine, inner: FrameOwner, servers: int) -> None:
        """``inner`` has their welcomes afterwards; so many ``servers`` are there."""
        self.bid = JoinBid(servers, begun=BEGUN_STEPS)
        self.servers = servers
        self.welcomes = 0
        self.said: bool | None = None
        """What the last round of questions has come to."""
        self.ending = False
        self._engine = engine
        self._inner = inner
        self._counts = False

    def room(self, peer: Connection, header: Header) -> memoryview:
        if self._counts:
            if header.kind == Kind.WELCOME:
                return self._inner.room(peer, header)
            raise RemoteProtocolError(f"server {peer.number} sent JOIN to a member")
        return nothing(header) if header.kind == Kind.WELCOME else bounded(header, 1 << 12)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if self._counts:
            self._inner.on_frame(peer, header, payload)
            return
        with self._engine.lock:
            if header.kind == Kind.WELCOME:
                self.welcomes += 1
            else:
                answer = decode_answer(payload)
                self.ending |= answer.ending
                self.said = self.bid.add(peer.number, answer)
        self._engine.progress.notify()

    def end(self) -> None:
        """It counts."""
        self._counts = True

    def ask(self) -> None:
        """All servers, for the step that it bids now; returns when all have answered."""
        self.said = None
        self._engine.send_to_all(Kind.JOIN, self.bid.step, CONTROL_PRIORITY, b"")
        self.wait(lambda: self.said is not None, "the servers to say from which step it may count")

    def wait(
        self, condition: Callable[[], bool], what: str, timeout_s: float | None = None
    ) -> None:
        config = self._engine.config
        limit_s = config.join_timeout_s if timeout_s is None else timeout_s
        setting = "join_timeout_s" if timeout_s is None else "step_timeout_s"
        self._engine.progress.wait_until(condition, limit_s, lambda: what, setting=setting)


def enter(backend: ServedBackend, parameters: Sequence[ManagedParameter]) -> int:
    """Be counted; returns the first step. All parameters are pending when this returns.

    Raises `HandshakeError` for a model that does not fit, and where the session is ending.
    """
    engine, members = backend.engine, backend.members
    if members is None or members.notices is None or members.entry is None:
        raise HandshakeError("join is set, and elastic is not: a session takes in nobody then")
    notices, entry = members.notices, members.entry
    engine.ending.start()
    for server, place in enumerate(backend.connections.places):
        manifest = msgspec.structs.replace(engine.manifest, session=place.session).encode()
        engine.send_message(server, Kind.MANIFEST, 0, CONTROL_PRIORITY, manifest)
    servers = entry.servers
    entry.wait(lambda: entry.welcomes == servers, "the servers to look at its manifest")
    _ask_until_promised(entry, engine)
    first, newest = entry.bid.step, entry.bid.newest
    for parameter in parameters:
        if isinstance(parameter, SynchronisedParameter):
            make_pending(parameter, first - 1)
    model = notices.model
    if model is None:
        engine.await_values(first - 1)  # before the servers know: values may come at once
    engine.come_after(first - 1)
    for server in range(len(engine.connections)):
        about = (server, Kind.JOINED, first, CONTROL_PRIORITY, b"")
        engine.send_message(*about, slice_=newest)
    arrivals = notices.arrivals
    entry.wait(
        lambda: len(arrivals.get(engine.rank, {})) == servers,
        "the servers to count it from then on",
    )
    entry.end()
    said = arrivals[engine.rank]
    order = _order_of(engine, said)
    engine.learn_priorities(order)
    if model is None:
        _await_most_urgent(entry, engine, order, first, newest)
    else:
        limit_s = engine.config.step_timeout_s * (first - newest)
        entry.wait(
            lambda: model.is_complete, f"what the others have after step {first - 1}", limit_s
        )
        model.install_state()
    _receive_blobs(backend, first - 1)
    if notices.given is not None:
        notices.given.has_own = True
    for parameter in parameters:
        if isinstance(parameter, AveragedParameter):
            parameter.has_first_value()
        elif not isinstance(parameter, SynchronisedParameter):
            parameter.receive_initial_value()
    engine.steps = first - 1
    LOGGER.info("rank %d has joined, and counts from step %d on", engine.rank, first)
    return first


def _ask_until_promised(entry: Entry, engine: WorkerEngine) -> None:
    """Returns with a first step. Waits while the others make the steps before it may have one."""
    limit_s, newest, since_s = engine.config.step_timeout_s, -1, 0.0
    while not entry.said:
        if entry.ending:
            raise HandshakeError(f"rank {engine.rank} cannot join: the session is ending")
        if entry.bid.newest != newest:
            newest, since_s = entry.bid.newest, time.monotonic()
        elif entry.bid.is_early and time.monotonic() > since_s + limit_s:
            raise StepTimeout(
                f"rank {engine.rank} wants to join, and the others have been in step {newest + 1}"
                f" for {limit_s:g} s (step_timeout_s): they take in nobody before step"
                f" {BEGUN_STEPS} is made"
            )
        if entry.said is False and entry.bid.is_early:
            time.sleep(_AGAIN_S)
        entry.ask()


def _order_of(engine: WorkerEngine, said: dict[int, Arrival]) -> list[int]:
    """The parameters as the others rank them."""
    most_urgent: dict[int, int] = {}
    for arrival in said.values():
        for slice_, priority in arrival.priorities:
            if not 0 <= slice_ < len(engine.slices):
                raise RemoteProtocolError(f"a priority of slice {slice_}, which there is not")
            parameter = engine.slices[slice_].parameter
            most_urgent[parameter] = min(priority, most_urgent.get(parameter, priority))
    last = len(engine.parameters)
    return sorted(range(last), key=lambda number: (most_urgent.get(number, last), number))


def _await_most_urgent(
    entry: Entry, engine: WorkerEngine, order: Sequence[int], first: int, newest: int
) -> None:
    """Others have still some steps to make before that comes, and each may take its time."""
    having = {piece.parameter for piece in engine.slices}
    urgent = next((number for number in order if number in having), None)
    if urgent is not None:
        engine.progress.awaited = urgent
        entry.wait(
            partial(engine.is_complete, urgent),
            f"the others to end step {first - 1}",
            engine.config.step_timeout_s * (first - newest),
        )


def _receive_blobs(backend: ServedBackend, step: int) -> None:
    """The lowest member's buffers after this step, and its frozen parameters."""
    tensors: list[Sequence[torch.Tensor]] = [[frozen] for frozen in backend.frozen]
    blobs = dict(enumerate(tensors, FROZEN_BLOB))
    if len(backend.buffers):
        blobs[BUFFERS_BLOB] = backend.buffers.now()
    for which, own in blobs.items():
        unpack_into(own, backend.engine.requests.await_blob(which, step, "the lowest rank"))
