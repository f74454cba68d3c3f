"""How a server admits a worker that joins later: asked, promised, settled, announced to all.

A newcomer is greeted, and asks to join. The server promises it a first step (`core.newcomers`),
and when that is settled, announces it to all members. What members send a newcomer passes through
servers, which know who joins: positions of loaders, parts of the model, buffers and frozen
parameters (`members.statetransfer`). Any member may be lost meanwhile, so several send the same. A
server forwards the positions and blobs that come first, and drops what is for nobody.
"""

from __future__ import annotations

import msgspec

from foreprop.config import LOGGER
from foreprop.core.agreement import describe_mismatch
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.manifest import Manifest
from foreprop.core.membership import Members
from foreprop.core.newcomers import AnswerJoin, JoinAsked, JoinSettled, MemberJoined
from foreprop.core.wire import MAX_PAYLOAD_BYTES, Header, Kind
from foreprop.engine.calls import Blobs
from foreprop.engine.connection import BoundedService, Connection, bounded, nothing
from foreprop.engine.executor import Executor
from foreprop.engine.joining import GreetingRefused
from foreprop.features.members.counting import Counting
from foreprop.features.members.messages import (
    LIMIT_BYTES,
    Arrival,
    ServerDirectory,
    ServerPlace,
    decode_directory,
    decode_positions,
)


class Admission:
    """Answers newcomers' requests, and keeps the directory of servers for whoever asks for it.

    It is the `engine.joining.Admitting` of an elastic session.
    """

    kinds = frozenset({Kind.JOIN, Kind.JOINED, Kind.SERVERS, Kind.POSITIONS})

    def __init__(self, manifest: Manifest, index: int, counting: Counting) -> None:
        self._manifest = manifest
        self._index = index
        self._counting = counting
        self._members = counting.members
        self._directory = ServerDirectory(manifest.session, ())
        # The servers that each rank says it has lost. Only members' words count: one that is
        # dropped may have lost its own connections.
        self._lost: dict[int, set[int]] = {}
        self._positions_sent: dict[int, int] = {}  # for which first step, by the newcomer's rank

    def begin(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = executor.lock
        executor.doers[AnswerJoin] = self._answer
        executor.doers[MemberJoined] = self._announce

    # For workers that have not joined yet.
    def directory(self) -> bytes:
        with self._lock:
            here = self._members.here
            lost = set().union(*(each for rank, each in self._lost.items() if rank in here))
            places = tuple(
                msgspec.structs.replace(place, is_lost=server in lost)
                for server, place in enumerate(self._directory.places)
            )
            free = tuple(self._free_ranks())
            return msgspec.structs.replace(self._directory, places=places, free=free).encode()

    def _free_ranks(self) -> list[int]:
        connections, machine = self._counting.connections, self._counting.machine
        return [
            rank
            for rank in range(self._members.workers)
            if rank not in self._members.here
            and machine.has_sent_all(rank)
            and (rank not in connections or connections[rank].ended)
        ]

    def place_of(self, rank: int) -> ServerPlace | None:
        """Where the server of a worker's node is; None if there is none, or it is not known."""
        with self._lock:
            node = rank // self._directory.workers_per_node
            return next((place for place in self._directory.places if place.node == node), None)

    def check_place(self, rank: int) -> None:
        if rank not in self._free_ranks():
            why = "is in the session" if rank in self._members.here else "has no place in it"
            raise GreetingRefused(f"rank {rank} wants to join, and {why}")

    def check_manifest(self, rank: int, manifest: Manifest) -> None:
        """Raise `GreetingRefused` for a manifest that is not the session's.

        Since the start the optimizer's numbers may have changed, and which parameters are frozen;
        their names must be the same.
        """
        replaced = msgspec.structs.replace
        ours, theirs = (
            replaced(
                each, parameters=tuple(replaced(p, requires_grad=True) for p in each.parameters)
            )
            for each in (self._manifest, manifest)
        )
        groups, others = ours.optimizer.groups, theirs.optimizer.groups
        if [sorted(group) for group in groups] == [sorted(group) for group in others]:
            optimizer = msgspec.structs.replace(theirs.optimizer, groups=groups)
            theirs = msgspec.structs.replace(theirs, optimizer=optimizer)
        text = describe_mismatch(ours, theirs, us="the session", them=f"rank {rank}")
        if text is not None:
            raise GreetingRefused(f"the session and rank {rank} do not agree: {text}")

    def welcome(self, peer: Connection) -> None:
        self._counting.expect(peer)
        self._executor.answer(peer.number, Kind.WELCOME, Header(Kind.MANIFEST, 0, 0, 0, 0, 0, 0))

    # Frames.
    def room(self, peer: Connection, header: Header) -> memoryview:
        has_text = header.kind in (Kind.SERVERS, Kind.POSITIONS)
        return bounded(header, LIMIT_BYTES) if has_text else nothing(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.SERVERS:
            directory = decode_directory(payload)
            with self._lock:
                if peer.number in self._members.here:
                    self._directory = directory
                    lost = {n for n, place in enumerate(directory.places) if place.is_lost}
                    self._lost[peer.number] = lost
        elif header.kind == Kind.POSITIONS:
            self._forward_positions(header, payload)
        elif header.kind == Kind.JOIN:
            self._executor.dispatch(JoinAsked(peer.number, header.step))
        else:
            with self._lock:
                settled = JoinSettled(peer.number, header.step, header.slice)
                joined, *rest = self._counting.machine.handle(settled)
                # with the lock: members hear of it before any answer that counts the newcomer
                if isinstance(joined, MemberJoined):
                    self._announce(joined)
            self._executor.execute(rest)

    def _forward_positions(self, header: Header, payload: memoryview) -> None:
        rank, step = header.slice, header.step
        decode_positions(payload, self._members.workers)
        with self._lock:
            joins = self._members.since.get(rank) == step and rank not in self._members.promised
            if joins and self._positions_sent.get(rank) != step:  # or another member was first
                self._positions_sent[rank] = step
                self._executor.send(rank, Kind.POSITIONS, step, CONTROL_PRIORITY, 0, bytes(payload))

    # What the executor does.
    def _answer(self, answer: AnswerJoin) -> None:
        data = msgspec.json.encode(answer)
        self._executor.send(answer.rank, Kind.JOIN, 0, CONTROL_PRIORITY, 0, data)

    def _announce(self, joined: MemberJoined) -> None:
        rank, step = joined
        self._counting.newcomers.add(rank)
        self._counting.add_voter(rank)
        here = tuple(sorted(self._members.settled))
        LOGGER.warning(
            "server %d counts rank %d from step %d on, which has joined; %d of %d workers are here",
            *(self._index, rank, step, len(here), len(self._members.ever)),
        )
        for other, first in self._members.since.items():
            if other in here and other != rank:  # it may have to give that one the model
                data = msgspec.json.encode(Arrival(other, first, here))
                self._executor.send(rank, Kind.JOINED, 0, CONTROL_PRIORITY, 0, data)
        arrival = Arrival(rank, step, here)
        own = Arrival(rank, step, here, tuple(self._counting.machine.priorities()))
        for member in here:
            data = msgspec.json.encode(own if member == rank else arrival)
            self._executor.send(member, Kind.JOINED, 0, CONTROL_PRIORITY, 0, data)


class PartsPassedOn(BoundedService):
    """Forwards parts of the model to the newcomers that count from the next step on."""

    kinds = frozenset({Kind.GIVEN})
    limit_bytes = MAX_PAYLOAD_BYTES

    def __init__(self, members: Members, executor: Executor) -> None:
        self._members = members
        self._executor = executor

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        first, part = header.step + 1, header.slice
        with self._executor.lock:
            if not self._members.had_values_before(peer.number, first):
                return
            for rank in self._members.coming_at(first):
                self._executor.send(rank, Kind.GIVEN, header.step, header.priority, part, payload)


class NewcomersBlobs:
    """Keeps rank 0's blobs of the start, and forwards members' blobs to newcomers."""

    kinds = Blobs.kinds

    def __init__(self, inner: Blobs, members: Members) -> None:
        self._inner = inner
        self._members = members
        self._executor = inner.executor
        # for which first step, by the newcomer's rank and the blob's number
        self._forwarded: dict[tuple[int, int], int] = {}

    def room(self, peer: Connection, header: Header) -> memoryview:
        return self._inner.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BLOB_PULL or header.step == 0:
            self._inner.on_frame(peer, header, payload)
            return
        first, which = header.step + 1, header.slice
        with self._executor.lock:
            if not self._members.had_values_before(peer.number, first):
                return
            for rank in self._members.coming_at(first):
                if self._forwarded.get((rank, which)) != first:
                    self._forwarded[rank, which] = first
                    kind, priority = Kind.BLOB_REPLY, CONTROL_PRIORITY
                    self._executor.send(rank, kind, header.step, priority, which, payload)
