"""What a worker has where others may leave, and its way to a substitute of a lost server.

That does without the rendezvous, whose store may have gone with the node: what a worker has to know
comes over connections that it has.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foreprop.buddies.survival import Survival
from foreprop.config import LOGGER
from foreprop.core.wire import Kind
from foreprop.elastic.attendance import Attendance, keep_attendance
from foreprop.elastic.countedfile import read_left
from foreprop.elastic.departure import LatePushes, MemberNotices
from foreprop.errors import ConfigError, TransportError
from foreprop.link.connection import greeting
from foreprop.link.stream import Stream, connect
from foreprop.servers.directory import Directory

if TYPE_CHECKING:
    import torch

    from foreprop.buddies.replaceable import ReplaceableStream
    from foreprop.buddies.substitutes import Substitution
    from foreprop.cluster.world import World
    from foreprop.config import Config
    from foreprop.hooks.modelhooks import ModelBuffers
    from foreprop.path.pipeline import Features
    from foreprop.path.worker import WorkerEngine
    from foreprop.servers.entering import Entry
    from foreprop.servers.launch import Connections

_TRY_S = 3.0
"""A substitute's node may go, too, and then nobody answers: so often that is looked for."""


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
    streams: Sequence[ReplaceableStream],
    world: World,
    given: tuple[ModelBuffers, Sequence[torch.Tensor]],
) -> Membership:
    """``given``: what newcomers get beside slices, buffers and frozen parameters."""
    knobs, receivers = engine.manifest.knobs, engine.receivers
    late = notices = directory = survival = entry = None
    if knobs.backup_workers:
        late = LatePushes(engine, receivers[Kind.REPLY])
        receivers.put_before(late)
    if knobs.elastic or knobs.counted_replay:
        notices = MemberNotices(engine)
        receivers.add(notices)
        notices.give(*given)
        keep_attendance(world, notices.attendance)
        if (folder := engine.config.counted_replay) is not None:
            replay_left(notices.attendance, folder, engine)
        if knobs.elastic:
            directory = Directory(engine, connections)
            if knobs.buddy_steps is not None:
                survival = survival_of(engine, connections, streams, notices, directory)
                receivers.add(survival.held)
                receivers.put_before(survival.replies)
                receivers.put_before(survival)
            if engine.config.join is not None:
                from foreprop.servers.entering import Entry

                entry = Entry(engine, receivers[Kind.WELCOME])
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


def survival_of(
    engine: WorkerEngine,
    connections: Connections,
    streams: Sequence[ReplaceableStream],
    notices: MemberNotices,
    directory: Directory,
) -> Survival:
    """Of a worker with a server beside it."""

    def reach(told: Substitution, look: Callable[[], None]) -> Stream:
        about = (told.server, told.session, told.address, told.port, look)
        return greet_at(connections, engine.config, engine.rank, *about)

    nodes = [place.node for place in connections.places]
    about = (lambda: notices.members, notices.without_servers, directory.taken_over, nodes)
    return Survival(engine, streams, engine.receivers, reach, connections.address, *about)
