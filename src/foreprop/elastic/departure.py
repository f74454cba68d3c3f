"""What servers tell of a worker that has left or joined, and what the others make of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from foreprop.config import LOGGER
from foreprop.core.decoding import decoded
from foreprop.core.wire import Flag, Header, Kind
from foreprop.elastic.admission import Arrival, decode_arrival
from foreprop.elastic.attendance import Attendance
from foreprop.elastic.givenmodel import GivenModel
from foreprop.elastic.memberblobs import GivenBlobs
from foreprop.elastic.positions import decode_positions
from foreprop.elastic.whereabouts import LIMIT_BYTES
from foreprop.errors import ForepropError, RemoteProtocolError
from foreprop.hooks.modelhooks import ModelBuffers
from foreprop.link.connection import Connection, FrameOwner, bounded
from foreprop.path.worker import WorkerEngine


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """One server's word of it: ``counted`` of its ``slices`` slices count the rank in ``step``."""

    rank: int
    step: int
    counted: int
    slices: int
    reason: str


_DEPARTURE = msgspec.json.Decoder(Departure)


class MemberNotices:
    """Owns word of who has left and who has joined, on a worker."""

    kinds = frozenset({Kind.LEFT, Kind.JOINED, Kind.POSITIONS})

    def __init__(self, engine: WorkerEngine, workers_per_node: int | None) -> None:
        self.arrivals: dict[int, dict[int, Arrival]] = {}
        """By rank and server: the last one."""
        self._engine = engine
        self._started, self._most = engine.manifest.world_size, engine.manifest.most_workers
        self._told: dict[int, dict[int, Departure]] = {}
        """By rank and server: the last one."""
        self._gone = dict.fromkeys(range(self._started, self._most), 0)
        """By rank: the step within which it has left, as far as is known; 0: before the start."""
        self.attendance = Attendance(engine, workers_per_node)
        self.given: GivenBlobs | None = None
        """What this rank has for newcomers."""
        self.model: GivenModel | None = None
        """Likewise, where workers update."""

    def end(self) -> None:
        """This member is about to say goodbye."""
        with contextlib.suppress(ForepropError):  # the session is over; closing says so
            self.attendance.end()

    def give(self, buffers: ModelBuffers, frozen: Sequence[torch.Tensor]) -> None:
        """To newcomers, in an elastic session."""
        self.given = GivenBlobs(self._engine, self.first_steps, buffers, frozen)
        self.attendance.gives.append(self.given)

    def give_model(self, model: GivenModel) -> None:
        """To newcomers, where workers update."""
        self.model = model
        self.attendance.gives.append(model)

    def first_steps(self) -> dict[int, int]:
        """Of those who are here, by rank; 0: it was here at the start."""
        joined = self.joined()
        return {rank: joined.get(rank, 0) for rank in self.members}

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.JOINED:
            joined = decode_arrival(payload)
            self._check_rank(joined.rank)
            self._on_arrival(peer.number, joined)
            return
        if header.kind == Kind.POSITIONS:
            self.attendance.hear_positions(decode_positions(payload, self._most))
            return
        told = decoded(_DEPARTURE, payload, "word of who has left")
        self._check_rank(told.rank)
        self._on_departure(peer.number, told)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._most:
            raise RemoteProtocolError(f"word of rank {rank} of {self._most}")

    def _on_departure(self, server: int, told: Departure) -> None:
        self.attendance.hear_left(told.rank, server, told.step)
        with self._engine.lock:
            joined = self._joined_at(told.rank)
            by_server = self._told.setdefault(told.rank, {})
            if told.step < joined - 1:  # one server's word may be slower than another one's
                if told.rank not in self._gone:
                    by_server[server] = told
                return
            first = told.rank not in self._gone
            if first:
                by_server.clear()
            by_server[server] = told
            self._gone[told.rank] = max(self._gone.get(told.rank, -1), told.step)
            members = self.members
        for gives in self.attendance.gives if first else ():
            gives.hear_left(told.rank)
        if first and members[:1] == [self._engine.rank]:
            LOGGER.warning(
                "rank %d has left within step %d: %s; %d of %d workers are left",
                *(told.rank, told.step, told.reason, len(members), self._ever),
            )

    def _on_arrival(self, server: int, told: Arrival) -> None:
        rank, step = told.rank, told.step
        with self._engine.lock:
            by_server = self.arrivals.setdefault(rank, {})
            before = self._joined_at(rank)
            if step < before:
                return
            if step > before:
                by_server.clear()
                self._gone.pop(rank, None)
            by_server[server] = told
            if rank == self._engine.rank:
                for other in set(told.members) - self._told.keys():
                    self._gone.pop(other, None)  # it has come before this one
                here = {*told.members, *self.arrivals, *self._gone}
                self._gone |= {other: 0 for other in range(self._most) if other not in here}
            members = self.members
        self._engine.progress.notify()
        self.attendance.hear_joined(rank, server, step)
        for gives in self.attendance.gives:
            gives.hear_joined(rank, server, step)
        others = [member for member in members if member != rank]
        if step > before and self._engine.rank == min(others, default=rank):
            LOGGER.warning(
                "rank %d has joined, and counts from step %d on; %d of %d workers are here",
                *(rank, step, len(members), self._ever),
            )

    def joined(self) -> dict[int, int]:
        """The first steps of those that came later, by rank."""
        return {rank: self._joined_at(rank) for rank in list(self.arrivals)}

    def without_servers(self) -> dict[int, int]:
        """Those that came later; of one that came before this one the first step may be unknown."""
        return dict.fromkeys(range(self._started, self._most), 0) | self.joined()

    def _joined_at(self, rank: int) -> int:
        return max((each.step for each in self.arrivals.get(rank, {}).values()), default=0)

    @property
    def members(self) -> list[int]:
        """Those who are here."""
        return [rank for rank in range(self._most) if rank not in self._gone]

    @property
    def _ever(self) -> int:
        """So many have been here, as far as is known."""
        return len({*range(self._started), *self.arrivals, *self.members})

    @property
    def gone(self) -> list[int]:
        """Of whom some server has told. Any thread."""
        with self._engine.lock:
            return sorted(self._told)

    def stats(self) -> dict[str, Any]:
        """For `Session.stats`: see docs/elastic.md."""
        with self._engine.lock:
            told = {rank: list(each.values()) for rank, each in self._told.items()}
            joined = self.joined()
            members = self.members
        left = {rank: _whole(each) for rank, each in told.items()}
        return {"members": members, "left": left, "joined": joined}


def _whole(told: list[Departure]) -> dict[str, Any]:
    """Of all servers that have told."""
    step = max(each.step for each in told)
    return {
        "step": step,
        "counted_slices": sum(each.counted for each in told if each.step == step),
        "slices": sum(each.slices for each in told),
        "reason": told[0].reason,
    }


class LatePushes:
    """Owns the answers to slices, on a worker that may be a backup: finds those that are newer.

    Then it holds parameters of two steps, and its next gradients must not count
    (`core.firstmembers`).
    """

    kinds = frozenset({Kind.REPLY})

    def __init__(self, engine: WorkerEngine, inner: FrameOwner) -> None:
        self._inner = inner
        self._lock = engine.lock
        self._newer_than = 0
        """The last step of which an answer was newer, or 0."""
        self.late_slices = 0
        """Answers of a later step than was pushed."""
        self.late_steps = 0
        """Steps whose pushes were not to count, for that."""
        self._counted_step = 0

    def flags_of(self, step: int) -> int:
        """More flags of the pushes of a step."""
        if not self._newer_than or step != self._newer_than + 1:
            return 0
        if self._counted_step != step:
            self._counted_step = step
            self.late_steps += 1
        return int(Flag.LATE)

    def room(self, peer: Connection, header: Header) -> memoryview:
        return self._inner.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.step == 0:
            self._newer_than = 0  # all values are read anew
        elif header.flags & Flag.LATE:
            with self._lock:
                self._newer_than = max(self._newer_than, header.step)
                self.late_slices += 1
        self._inner.on_frame(peer, header, payload)

    def stats(self) -> dict[str, Any]:
        """For `Session.stats`."""
        return {"late_slices": self.late_slices, "late_steps": self.late_steps}
