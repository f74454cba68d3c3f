"""What a worker has where others may leave, and its way to a substitute of a lost server.

That does without the rendezvous, whose store may have gone with the node: what a worker has to know
comes over connections that it has.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from foreprop.buddies.survival import Survival
from foreprop.config import LOGGER
from foreprop.elastic.attendance import Attendance, keep_attendance
from foreprop.elastic.countedfile import read_left
from foreprop.elastic.departure import LatePushes, MemberNotices
from foreprop.errors import ConfigError, TransportError
from foreprop.link.connection import greeting
from foreprop.link.stream import Stream, connect
from foreprop.servers.directory import Directory

if TYPE_CHECKING:
    from foreprop.buddies.substitutes import Substitution
    from foreprop.cluster.world import World
    from foreprop.config import Config
    from foreprop.path.worker import WorkerEngine
    from foreprop.servers.launch import Connections
    from foreprop.servers.served import ServedBackend

_TRY_S = 3.0
"""A substitute's node may go, too, and then nobody answers: so often that is looked for."""


def add_members(backend: ServedBackend, world: World) -> None:
    """What a worker has where not all workers always count."""
    engine, knobs = backend.engine, backend.engine.manifest.knobs
    if knobs.backup_workers:
        backend.late = LatePushes(engine)
    if knobs.elastic or knobs.counted_replay:
        backend.notices = notices = MemberNotices(engine)
        notices.give(backend.buffers, backend.frozen)
        keep_attendance(world, backend.notices.attendance)
        if (folder := engine.config.counted_replay) is not None:
            replay_left(backend.notices.attendance, folder, engine)
        if knobs.elastic:
            backend.directory = directory = Directory(engine, backend.connections)
            if knobs.buddy_steps is not None:
                backend.survival = survival_of(engine, backend.connections, backend.notices)
                backend.survival.on_takeover = directory.taken_over


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
    look: Callable[[], None] = lambda: None,
) -> Stream:
    """Connect to a server that is known by its address, and say who it is that comes.

    Raises `TransportError`, `HandshakeError` if secrets differ, and what ``look`` raises.
    """
    timeout_s = config.join_timeout_s
    sock = _connected(host, port, timeout_s, look)
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


def _connected(host: str, port: int, timeout_s: float, look: Callable[[], None]) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > _TRY_S:
        look()
        with contextlib.suppress(TransportError):
            return connect(host, port, timeout_s=_TRY_S)
    look()
    return connect(host, port, timeout_s=max(left_s, 0.1))


def survival_of(engine: WorkerEngine, connections: Connections, notices: MemberNotices) -> Survival:
    """Of a worker with a server beside it."""

    def reach(told: Substitution, look: Callable[[], None]) -> Stream:
        about = (told.server, told.session, told.address, told.port, look)
        return greet_at(connections, engine.config, engine.rank, *about)

    nodes = [place.node for place in connections.places]
    about = (lambda: notices.members, notices.without_servers, nodes)
    return Survival(engine, reach, connections.address, *about)
