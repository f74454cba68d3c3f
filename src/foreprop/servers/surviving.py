"""What a worker has where others may leave, and its way to servers whose addresses it knows.

That does without the rendezvous, whose store may have gone with a node.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foreprop.config import LOGGER
from foreprop.core.takeover import NOBODY
from foreprop.core.wire import Kind
from foreprop.elastic.attendance import Attendance, keep_attendance
from foreprop.elastic.countedfile import read_left
from foreprop.elastic.departure import LatePushes, MemberNotices
from foreprop.elastic.givenmodel import GivenModel
from foreprop.elastic.survival import Survival
from foreprop.errors import ConfigError, TransportError
from foreprop.link.connection import greeting
from foreprop.link.stream import Stream, connect
from foreprop.servers.directory import Directory

if TYPE_CHECKING:
    from foreprop.config import Config
    from foreprop.path.pipeline import Features
    from foreprop.path.worker import WorkerEngine
    from foreprop.servers.entering import Entry
    from foreprop.servers.launch import Connections
    from foreprop.servers.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What a worker has where not all workers always count."""

    late: LatePushes | None = None
    notices: MemberNotices | None = None
    directory: Directory | None = None
    survival: Survival | None = None
    entry: Entry | None = None
    """Of a newcomer."""

    def stats(self) -> dict[str, Any]:
        """For `Session.stats`."""
        parts = (self.notices, self.directory, self.late, self.survival)
        return {k: v for part in parts if part is not None for k, v in part.stats().items()}

    def features(self, features: Features) -> Features:
        """These, and what members do in their engines."""
        flags_of = None if self.late is None else self.late.flags_of
        features = replace(features, flags_of=flags_of, losses=self.survival)
        if self.notices is None:
            return features
        end_window, before_goodbye = self.notices.attendance.end_step, self.notices.end
        return replace(
            features, end_window=end_window, window_steps=1, before_goodbye=before_goodbye
        )


def make_members(
    engine: WorkerEngine,
    connections: Connections,
    setup: Setup,
) -> Membership:
    knobs, receivers = engine.manifest.knobs, engine.receivers
    late = notices = directory = survival = entry = None
    if knobs.backup_workers:
        late = LatePushes(engine, receivers[Kind.REPLY])
        receivers.put_before(late)
    if knobs.elastic or knobs.counted_replay:
        beside = None if setup.config.dedicated_servers else connections.workers_per_node
        notices = MemberNotices(engine, beside)
        receivers.add(notices)
        notices.give(setup.buffers, setup.frozen)
        keep_attendance(setup.world, notices.attendance)
        if (folder := engine.config.counted_replay) is not None:
            replay_left(notices.attendance, folder, engine)
        if knobs.elastic:
            directory = Directory(engine, connections)
            if engine.manifest.outlives_servers:
                nodes = [connections.node_of(server) for server in range(connections.servers)]
                own = connections.node if connections.node in nodes else NOBODY
                about = (setup.optimizer, setup.parameters, notices.first_steps, own)
                model = GivenModel(engine, *about)
                notices.give_model(model)

                def lost(server: int) -> None:
                    directory.lost(server)
                    notices.attendance.lose_server(server)
                    for gives in notices.attendance.gives:
                        gives.give_again()

                survival = Survival(engine, nodes, connections.node, lost)
                survival.begin_without(connections.lost)
                receivers.add(survival, model)
            if engine.config.join is not None:
                from foreprop.servers.entering import Entry

                here = connections.servers - len(connections.lost)
                entry = Entry(engine, receivers[Kind.WELCOME], here)
                receivers.put_before(entry)
    return Membership(
        late=late, notices=notices, directory=directory, survival=survival, entry=entry
    )


def replay_left(attendance: Attendance, folder: str, engine: WorkerEngine) -> None:
    """`foreprop.shard` is to deal as it did when the log was written."""
    try:
        attendance.replay(read_left(folder, engine.manifest.world_size, engine.slices))
    except ConfigError as error:
        LOGGER.warning(
            "rank %d: shard() deals data as if nobody had left in the session of the log, of which"
            " this machine has not all: %s",
            *(engine.rank, error),
        )


def greet_at(
    connections: Connections,
    config: Config,
    rank: int,
    server: int,
    session: str,
    host: str,
    port: int,
) -> Stream:
    """Connect to a server that is known by its address, and say who it is that comes.

    Raises `TransportError`, and `HandshakeError` if secrets differ.
    """
    timeout_s = config.join_timeout_s
    sock = connect(host, port, timeout_s=timeout_s)
    try:
        if config.secret_file is not None:
            from foreprop.link.secret import authenticate

            about = (session, f"server {server}", rank)
            deadline = time.monotonic() + timeout_s
            connections.channel = authenticate(sock, config, *about, deadline, lambda: None)
        connections.tuned(sock).sendall(greeting(session, rank))
    except OSError as error:
        sock.close()
        raise TransportError(
            f"rank {rank}'s connection to server {server} at {host} port {port} ended at once:"
            f" {error}"
        ) from error
    stream = connections.stream_over(sock, server)
    connections.watch(server, sock, session, f"server {server}")
    return stream
