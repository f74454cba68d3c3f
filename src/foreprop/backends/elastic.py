"""A worker's part in a session whose members change, and a newcomer's way into one.

Members know where the servers are, and tell them, so that a newcomer learns it from any of them: it
asks where its servers are, and when it may count (`core.newcomers`). Nothing of it needs the
rendezvous, whose store may have gone with a node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from foreprop.backends.launch import Connections
from foreprop.config import LOGGER, Config
from foreprop.config.checks import parse_addresses
from foreprop.config.launchers import servers_file
from foreprop.core.authentication import NONCE_BYTES, QUESTION, ConnectingSide
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.manifest import BUFFERS_BLOB, FROZEN_BLOB
from foreprop.core.newcomers import BEGUN_STEPS, JoinBid
from foreprop.core.slicing import Shard, Slice
from foreprop.core.takeover import NOBODY
from foreprop.core.wire import FrameReader, Header, Kind
from foreprop.engine.connection import Connection, Service, bounded, nothing, unencrypted
from foreprop.engine.ending import Losses
from foreprop.engine.secret import load_key, prove, secret_file_of
from foreprop.engine.stream import Stream, connect, load_checksum
from foreprop.engine.worker import Features, WorkerEngine
from foreprop.engine.world import World
from foreprop.errors import (
    ConfigError,
    ForepropError,
    HandshakeError,
    RemoteProtocolError,
    StepTimeout,
    TransportError,
    decode_failure,
)
from foreprop.features.members.countedlog import read_left
from foreprop.features.members.membershipview import (
    LatePushes,
    MemberNotices,
    MembershipView,
    keep_view,
)
from foreprop.features.members.messages import (
    LIMIT_BYTES,
    Arrival,
    ServerDirectory,
    ServerPlace,
    decode_answer,
    decode_directory,
)
from foreprop.features.members.statetransfer import GivenModel, make_pending
from foreprop.features.members.survival import Moves, Survival
from foreprop.params.averaged import Averages
from foreprop.params.modelhooks import unpack_into
from foreprop.params.parameter import Parameter
from foreprop.params.servedparameter import ServedValues
from foreprop.params.setup import Setup
from foreprop.quantities import counted

_AGAIN_S = 0.2
_ANSWER_S = 5.0
"""How long a server may take to say where the others are, which it does at once."""


class Directory:
    """Where the servers are, as one worker tells them; each knows only where it is itself."""

    def __init__(
        self, engine: WorkerEngine, connections: Connections, told: ServerDirectory | None
    ) -> None:
        self._engine = engine
        self._session = connections.session_id
        self._about = ServerDirectory(
            self._session, (), workers_per_node=connections.workers_per_node, chooses=True
        )
        self.places = [] if told is None else list(told.places)
        if told is None:
            direct = [sock for sock in connections.sockets if type(sock) is socket.socket]
            for server, sock in enumerate(direct):
                host, port = sock.getpeername()[:2]
                self.places.append(
                    ServerPlace(host, port, self._session, connections.node_of(server))
                )

    def tell_about(self, **about: Any) -> None:
        """Change fields of the `ServerDirectory` that is told from now on."""
        self._about = msgspec.structs.replace(self._about, **about)
        self.tell()

    def tell(self) -> None:
        """Tell all servers, and the file that a launcher may look at. Any thread."""
        with self._engine.lock:
            told = msgspec.structs.replace(self._about, places=tuple(self.places))
        if not told.chooses:
            self._write(told)
        with contextlib.suppress(ForepropError):  # the session is over; others say so
            self._engine.send_to_all(Kind.SERVERS, 0, CONTROL_PRIORITY, told.encode())

    def lost(self, server: int) -> None:
        """Tell that a server is no more: others have its slices."""
        with self._engine.lock:
            self.places[server] = msgspec.structs.replace(self.places[server], is_lost=True)
        self.tell()

    def _write(self, told: ServerDirectory) -> None:
        path = servers_file()
        if path is None:
            return
        beside = Path(f"{path}.{os.getpid()}")
        here = [place for place in told.places if not place.is_lost]
        try:
            beside.write_text("".join(f"{place}\n" for place in here))
            beside.replace(path)
        except OSError as error:
            LOGGER.warning("FOREPROP_SERVERS_FILE: %s cannot be written: %s", path, error)

    def stats(self) -> dict[str, Any]:
        with self._engine.lock:
            here = [str(place) for place in self.places if not place.is_lost]
        return {"servers": [] if self._about.chooses else here}


# A newcomer: where the servers are.
def connect_to_all(world: World, config: Config, connections: Connections) -> ServerDirectory:
    """Connect to all servers of the session, when this rank's place is free at each of them.

    Returns where they are. Raises `HandshakeError` if it is not within ``join_timeout_s``, or for
    another cluster, and `ConfigError` for a rank that there cannot be.
    """
    most = max(world.size, config.max_workers or 0)
    if world.rank >= most:
        more = f", or of one of those that may come, {world.size} to {most - 1}"
        raise ConfigError(
            f"RANK is {world.rank}, WORLD_SIZE {world.size} and max_workers {config.max_workers}: a"
            f" newcomer has the RANK of a worker that was lost{more if most > world.size else ''}"
        )

    def why_not(found: ServerDirectory) -> str:
        _check_shape(found, config, connections)
        return _why_place_taken(world.rank, config, found)

    found = _ask_until(world.rank, config, why_not)
    connections.session_id = found.session
    for server, place in enumerate(found.places):
        connections.streams.append(
            EndedStream()
            if place.is_lost
            else connections.greet_at(server, place.session, place.host, place.port)
        )
    return found


def _lost_places(told: ServerDirectory) -> list[int]:
    return [server for server, place in enumerate(told.places) if place.is_lost]


def with_chosen_codecs(rank: int, config: Config) -> Config:
    """The config with what others have chosen for ``"auto"``; waits until they have."""
    found = _ask_until(rank, config, lambda found: "")
    return config.replace(compression=found.compression or None)


def _ask_until(
    rank: int, config: Config, why_not: Callable[[ServerDirectory], str]
) -> ServerDirectory:
    """Ask until a session has begun with which nothing is wrong; returns its directory."""
    deadline = time.monotonic() + config.join_timeout_s
    while True:
        try:
            found = _ask_one_of(rank, config)
            if found.chooses or not found.places:
                begins = ", and has still to choose codecs" if found.chooses else ""
                raise TransportError(f"the session that is to be joined is just beginning{begins}")
            wrong = why_not(found)
            if not wrong:
                return found
            error: Exception = HandshakeError(wrong)
        except TransportError as lost:
            error = lost
        if time.monotonic() >= deadline:
            raise type(error)(f"{error}, for {config.join_timeout_s:g} s (join_timeout_s)")
        time.sleep(_AGAIN_S)


def _ask_one_of(rank: int, config: Config) -> ServerDirectory:
    """The answer of the first address in ``join`` that has one."""
    errors = []
    for host, port in parse_addresses(config.join or ""):
        try:
            return ask(host, port, rank, config)
        except TransportError as error:
            errors.append(str(error))
    raise TransportError(f"rank {rank} wants to join at {config.join} (join): {'; '.join(errors)}")


def _check_shape(found: ServerDirectory, config: Config, connections: Connections) -> None:
    servers = len(found.places)
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


def _why_place_taken(rank: int, config: Config, found: ServerDirectory) -> str:
    """Why the rank's place is not free at some server; empty if it is."""
    for server, place in enumerate(found.places):
        if not place.is_lost and rank not in ask(place.host, place.port, rank, config).free:
            return (
                f"rank {rank} wants to join, and is in the session, as server {server} sees it: a"
                " newcomer takes the RANK of a worker that was lost, or a new one below max_workers"
            )
    return ""


def ask(host: str, port: int, rank: int, config: Config) -> ServerDirectory:
    """Ask a server where all servers are; raises `TransportError` if it does not answer."""
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
    key = load_key(secret_file_of(config))
    side = ConnectingSide(key, QUESTION, rank, secrets.token_bytes(NONCE_BYTES))
    prove(sock, side, time.monotonic() + _ANSWER_S, lambda: None)


def _read_answer(sock: socket.socket, where: str) -> ServerDirectory:
    reader = FrameReader(lambda header: bounded(header, LIMIT_BYTES), load_checksum())
    while received := sock.recv_into(reader.buffer):
        frame = reader.advance(received)
        if frame is None:
            continue
        if frame.header.kind == Kind.FAILURE:
            raise TransportError(decode_failure(frame.payload).message)
        if frame.header.kind != Kind.SERVERS:
            raise RemoteProtocolError(f"{where} answers with {Kind(frame.header.kind).name}")
        return decode_directory(frame.payload)
    raise TransportError(f"{where} closed the connection: no server of a running session")


class EndedStream(Stream):
    """What stands for a connection to a server that was lost before."""

    def send(self, header: bytes, payload: memoryview) -> None:
        raise TransportError("the server was lost before this worker came")

    def receive_into(self, view: memoryview) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to be closed."""


# A newcomer: into the session.
class Entry:
    """Owns the servers' answers to a newcomer, until it counts."""

    kinds = frozenset({Kind.WELCOME, Kind.JOIN})

    def __init__(self, engine: WorkerEngine, inner: Service, servers: int) -> None:
        """``inner`` has the welcomes afterwards; there are so many ``servers``."""
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
        """Hand on what comes from now on: this worker counts."""
        self._counts = True

    def ask(self) -> None:
        """Ask all servers for the step that is bid now; returns when all have answered."""
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


def enter(
    engine: WorkerEngine,
    members: Membership | None,
    told: ServerDirectory,
    setup: Setup,
    parameters: Sequence[Parameter],
) -> int:
    """Enter the session; returns the first step that counts. All parameters are pending then.

    Raises `HandshakeError` for a model that does not fit, and where the session is ending.
    """
    if members is None or members.notices is None or members.entry is None:
        raise HandshakeError("join is set, and elastic is not: a session takes in nobody then")
    notices, entry = members.notices, members.entry
    engine.ending.start()
    for server, place in enumerate(told.places):
        manifest = msgspec.structs.replace(engine.manifest, session=place.session).encode()
        engine.send_message(server, Kind.MANIFEST, 0, CONTROL_PRIORITY, manifest)
    servers = entry.servers
    entry.wait(lambda: entry.welcomes == servers, "the servers to look at its manifest")
    _ask_until_promised(entry, engine)
    first, newest = entry.bid.step, entry.bid.newest
    for parameter in parameters:
        if isinstance(parameter.arrival, ServedValues):
            make_pending(parameter.arrival, first - 1)
    model = notices.model
    if model is None:
        engine.await_values(first - 1)  # before the servers know: values may come at once
    engine.come_after(first - 1)
    for server in range(len(engine.connections)):
        engine.send_message(server, Kind.JOINED, first, CONTROL_PRIORITY, b"", slice_=newest)
    arrivals = notices.arrivals
    entry.wait(
        lambda: len(arrivals.get(engine.rank, {})) == servers,
        "the servers to count it from then on",
    )
    entry.end()
    order = _order_of(engine, arrivals[engine.rank])
    engine.learn_priorities(order)
    if model is None:
        _await_most_urgent(entry, engine, order, first, newest)
    else:
        limit_s = engine.config.step_timeout_s * (first - newest)
        entry.wait(
            lambda: model.is_complete, f"what the others have after step {first - 1}", limit_s
        )
        model.install_state()
    _receive_blobs(engine, setup, first - 1)
    if notices.given is not None:
        notices.given.has_own = True
    for parameter in parameters:
        if not isinstance(parameter.arrival, (Averages, ServedValues)):
            parameter.arrival.receive_initial_value()
    engine.steps = first - 1
    if (moves := members.moves) is not None:
        entry.wait(lambda: moves.is_told, "a member to tell where slices are")
        moves.begin_step(first)
    counted_from = first + told.steps_before
    LOGGER.info("rank %d has joined, and counts from step %d on", engine.rank, counted_from)
    return first


def _ask_until_promised(entry: Entry, engine: WorkerEngine) -> None:
    """Ask until all servers promise a first step, while the others make those before it."""
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
    """The parameters in the order that the others have learned."""
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
    """Wait for the most urgent parameter, for as long as the others' steps may take."""
    having = {piece.parameter for piece in engine.slices}
    urgent = next((number for number in order if number in having), None)
    if urgent is not None:
        engine.progress.awaited = urgent
        entry.wait(
            partial(engine.is_complete, urgent),
            f"the others to end step {first - 1}",
            engine.config.step_timeout_s * (first - newest),
        )


def _receive_blobs(engine: WorkerEngine, setup: Setup, step: int) -> None:
    """Receive the lowest member's buffers after this step, and its frozen parameters."""
    tensors: list[Sequence[torch.Tensor]] = [[frozen] for frozen in setup.frozen]
    blobs = dict(enumerate(tensors, FROZEN_BLOB))
    if len(setup.buffers):
        blobs[BUFFERS_BLOB] = setup.buffers.now()
    for which, own in blobs.items():
        unpack_into(own, engine.requests.await_blob(which, step, "the lowest rank"))


# What of this a worker has.
@dataclass(frozen=True, kw_only=True)
class Membership:
    """What of members and their changes a worker has; None where a session needs it not."""

    late: LatePushes | None = None
    notices: MemberNotices | None = None
    directory: Directory | None = None
    survival: Survival | None = None
    entry: Entry | None = None
    """What lets this newcomer in."""
    moves: Moves | None = None
    """What moves slices, where they may move."""

    def stats(self) -> dict[str, Any]:
        """What `Session.stats` has of members."""
        parts = (self.notices, self.directory, self.late, self.survival)
        return {k: v for part in parts if part is not None for k, v in part.stats().items()}

    def features(self, features: Features) -> Features:
        """These features, with what members add to their engines."""
        flags_of = None if self.late is None else self.late.flags_of
        features = replace(features, flags_of=flags_of, losses=self.survival or Losses())
        if self.notices is None:
            return features
        end_window, before_goodbye = self.notices.view.end_step, self.notices.end
        return replace(
            features, end_window=end_window, window_steps=1, before_goodbye=before_goodbye
        )


def make_members(
    engine: WorkerEngine, connections: Connections, setup: Setup, told: ServerDirectory | None
) -> Membership:
    """Make what the settings ask for; ``told`` is where the servers are, for a newcomer."""
    knobs, receivers = engine.manifest.knobs, engine.receivers
    lost_before = [] if told is None else _lost_places(told)
    late = notices = directory = survival = entry = moves = None
    if knobs.backup_workers:
        late = LatePushes(engine, receivers)
        receivers.put_before(late)
    if knobs.elastic or knobs.counted_replay:
        beside = None if setup.config.dedicated_servers else connections.workers_per_node
        notices = MemberNotices(engine, beside)
        receivers.add(notices)
        notices.give(setup.buffers, setup.frozen)
        keep_view(setup.world, notices.view)
        if (folder := engine.config.counted_replay) is not None:
            replay_left(notices.view, folder, engine)
        if knobs.elastic:
            directory = Directory(engine, connections, told)
            if engine.manifest.outlives_servers:
                nodes = [connections.node_of(server) for server in range(connections.servers)]
                own = connections.node if connections.node in nodes else NOBODY
                about = (setup.optimizer, setup.parameters, notices.first_steps, own)
                model = GivenModel(engine, *about)
                notices.give_model(model)

                def lost(server: int) -> None:
                    directory.lost(server)
                    notices.view.lose_server(server)
                    for giver in notices.view.givers:
                        giver.give_again()

                survival = Survival(engine, nodes, connections.node, lost)
                survival.begin_without(lost_before)
                receivers.add(survival, model)
                if setup.config.rebalance_s is not None:
                    moves = notices.view.moves = Moves(engine, survival)
                    receivers.add(moves)
            if engine.config.join is not None:
                here = connections.servers - len(lost_before)
                entry = Entry(engine, receivers[Kind.WELCOME], here)
                receivers.put_before(entry)
    return Membership(
        late=late,
        notices=notices,
        directory=directory,
        survival=survival,
        entry=entry,
        moves=moves,
    )


def replay_left(view: MembershipView, folder: str, engine: WorkerEngine) -> None:
    """Have `foreprop.shard` deal as it did when the log was written."""
    try:
        pieces: list[Slice | Shard] = [*engine.slices, *engine.shards]
        view.replay(read_left(folder, engine.manifest.world_size, pieces))
    except ConfigError as error:
        LOGGER.warning(
            "rank %d: shard() deals data as if nobody had left in the session of the log, of which"
            " this machine has not all: %s",
            *(engine.rank, error),
        )
