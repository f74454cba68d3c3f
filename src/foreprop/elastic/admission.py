"""How a server takes in a worker that comes later: asked, promised, settled, told to all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from foreprop.config import LOGGER
from foreprop.core.agreement import describe_mismatch
from foreprop.core.decoding import decoded
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.manifest import Manifest
from foreprop.core.newcomers import AnswerJoin, JoinAsked, JoinSettled, MemberJoined
from foreprop.core.wire import Header, Kind
from foreprop.elastic.memberblobs import NewcomersBlobs
from foreprop.elastic.partspassedon import PartsPassedOn
from foreprop.elastic.positions import decode_positions
from foreprop.elastic.whereabouts import (
    LIMIT_BYTES,
    ServerPlace,
    Whereabouts,
    decode_whereabouts,
)
from foreprop.link.connection import Connection, bounded, nothing
from foreprop.path.joining import GreetingRefused

if TYPE_CHECKING:
    from foreprop.elastic.counting import Counting
    from foreprop.path.calls import Blobs
    from foreprop.path.executor import Executor


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """One server's word of who has joined: it counts from ``step`` on."""

    rank: int
    step: int
    members: tuple[int, ...]
    """All that are here now, as the server has it."""
    priorities: tuple[tuple[int, int], ...] = ()
    """For the newcomer: of the server's slices, as they were pushed last."""


_ARRIVAL = msgspec.json.Decoder(Arrival)
_JOIN = msgspec.json.Decoder(AnswerJoin)


def decode_arrival(payload: memoryview) -> Arrival:
    return decoded(_ARRIVAL, payload, "word of who has joined")


def decode_answer(payload: memoryview) -> AnswerJoin:
    return decoded(_JOIN, payload, "an answer to who wants to join")


class Admission:
    """Owns what newcomers ask of a server, and what members tell it of where servers are.

    It is the `path.joining.Admitting` of an elastic session.
    """

    kinds = frozenset({Kind.JOIN, Kind.JOINED, Kind.SERVERS, Kind.POSITIONS})

    def __init__(self, manifest: Manifest, index: int, counting: Counting) -> None:
        self._manifest = manifest
        self._index = index
        self._counting = counting
        self._members = counting.members
        self._where = Whereabouts(manifest.session, ())
        self._lost: dict[int, set[int]] = {}
        """By rank that has told: the servers that it has lost. Only members' words count: one
        that is dropped may have lost its own connections."""
        self._placed: dict[int, int] = {}
        """By newcomer that has been told where loaders are: its first step."""

    def begin(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = executor.lock
        executor.doers[AnswerJoin] = self._answer
        executor.doers[MemberJoined] = self._tell

    def passing_on(self, blobs: Blobs) -> NewcomersBlobs:
        """Also what members have for newcomers."""
        return NewcomersBlobs(blobs, self._members)

    def parts_passed_on(self, executor: Executor) -> PartsPassedOn:
        return PartsPassedOn(self._members, executor)

    # For who is not here yet.
    def whereabouts(self) -> bytes:
        with self._lock:
            here = self._members.here
            lost = set().union(*(each for rank, each in self._lost.items() if rank in here))
            places = tuple(
                msgspec.structs.replace(place, is_lost=server in lost)
                for server, place in enumerate(self._where.places)
            )
            free = tuple(self._free())
            return msgspec.structs.replace(self._where, places=places, free=free).encode()

    def _free(self) -> list[int]:
        """The ranks that have not come, or were lost and have nothing under way any more."""
        connections, machine = self._counting.connections, self._counting.machine
        return [
            rank
            for rank in range(self._members.workers)
            if rank not in self._members.here
            and machine.has_sent_all(rank)
            and (rank not in connections or connections[rank].ended)
        ]

    def place_of(self, rank: int) -> ServerPlace | None:
        """Of the server that goes with a worker; None: there is none, or nobody has told."""
        with self._lock:
            node = rank // self._where.workers_per_node
            return next((place for place in self._where.places if place.node == node), None)

    def check_place(self, rank: int) -> None:
        if rank not in self._free():
            why = "is in the session" if rank in self._members.here else "has no place in it"
            raise GreetingRefused(f"rank {rank} wants to join, and {why}")

    def check_manifest(self, rank: int, manifest: Manifest) -> None:
        """The optimizer's numbers may have changed since the start: names must be the same.

        So may have what is frozen.
        """
        ours, theirs = (_whatever_is_frozen(each) for each in (self._manifest, manifest))
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
            told = decode_whereabouts(payload)
            with self._lock:
                if peer.number in self._members.here:
                    self._where = told
                    lost = {number for number, place in enumerate(told.places) if place.is_lost}
                    self._lost[peer.number] = lost
        elif header.kind == Kind.POSITIONS:
            self._pass_on(header, payload)
        elif header.kind == Kind.JOIN:
            self._executor.dispatch(JoinAsked(peer.number, header.step))
        else:
            self._settle(JoinSettled(peer.number, header.step, header.slice))

    def _pass_on(self, header: Header, payload: memoryview) -> None:
        """The first one that a member sends; the newcomer may be gone again."""
        rank, step = header.slice, header.step
        decode_positions(payload, self._members.workers)
        with self._lock:
            awaits = self._members.since.get(rank) == step and self._placed.get(rank) != step
            if not awaits or rank in self._members.promised:
                return
            self._placed[rank] = step
            self._executor.send(rank, Kind.POSITIONS, step, CONTROL_PRIORITY, 0, bytes(payload))

    def _settle(self, event: JoinSettled) -> None:
        """Members hear of it before whatever it lets go of, also by other threads."""
        with self._lock:
            joined, *rest = self._counting.machine.handle(event)
            if isinstance(joined, MemberJoined):
                self._tell(joined)
        self._executor.execute(rest)

    # Doing.
    def _answer(self, answer: AnswerJoin) -> None:
        data = msgspec.json.encode(answer)
        self._executor.send(answer.rank, Kind.JOIN, 0, CONTROL_PRIORITY, 0, data)

    def _tell(self, joined: MemberJoined) -> None:
        rank, step = joined
        self._counting.newcomers.add(rank)
        self._counting.joined(rank)
        here = tuple(sorted(self._members.settled))
        LOGGER.warning(
            "server %d counts rank %d from step %d on, which has joined; %d of %d workers are here",
            *(self._index, rank, step, len(here), len(self._members.ever)),
        )
        told = Arrival(rank, step, here)
        own = Arrival(rank, step, here, tuple(self._counting.machine.priorities()))
        for member in here:
            data = msgspec.json.encode(own if member == rank else told)
            self._executor.send(member, Kind.JOINED, 0, CONTROL_PRIORITY, 0, data)


def _whatever_is_frozen(manifest: Manifest) -> Manifest:
    infos = [msgspec.structs.replace(each, requires_grad=True) for each in manifest.parameters]
    return msgspec.structs.replace(manifest, parameters=tuple(infos))
