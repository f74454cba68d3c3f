"""What servers tell of a worker that has left, and what its survivors make of it."""

from __future__ import annotations

from typing import Any

import msgspec

from foreprop.config import LOGGER
from foreprop.core.wire import Flag, Header, Kind
from foreprop.elastic.attendance import Attendance
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, bounded
from foreprop.path.worker import WorkerEngine

_LIMIT_BYTES = 1 << 16


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """One server's word of it: ``counted`` of its ``slices`` slices count the rank in ``step``."""

    rank: int
    step: int
    counted: int
    slices: int
    reason: str


_DEPARTURE = msgspec.json.Decoder(Departure)


class MemberNotices:
    """Owns word of who has left, on a worker."""

    kinds = frozenset({Kind.LEFT})

    def __init__(self, engine: WorkerEngine) -> None:
        self._engine = engine
        self._world_size = engine.manifest.world_size
        self._told: dict[int, dict[int, Departure]] = {}
        """By rank and server."""
        self.attendance = Attendance(engine)
        engine.use(self)

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, _LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        try:
            told = _DEPARTURE.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"not word of who has left: {error}") from error
        with self._engine.lock:
            first = told.rank not in self._told
            self._told.setdefault(told.rank, {})[peer.number] = told
            members = self.members
        if first and self._engine.rank == members[0]:
            LOGGER.warning(
                "rank %d has left within step %d: %s; %d of %d workers are left",
                *(told.rank, told.step, told.reason, len(members), self._world_size),
            )
        self.attendance.hear_left(told.rank, peer.number, told.step)

    @property
    def members(self) -> list[int]:
        """Those who are left."""
        return [rank for rank in range(self._world_size) if rank not in self._told]

    @property
    def gone(self) -> list[int]:
        """Of whom some server has told. Any thread."""
        with self._engine.lock:
            return sorted(self._told)

    def stats(self) -> dict[str, Any]:
        """For `Session.stats`: see docs/elastic.md."""
        with self._engine.lock:
            told = {rank: list(each.values()) for rank, each in self._told.items()}
            members = self.members
        return {"members": members, "left": {rank: _whole(each) for rank, each in told.items()}}


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
    (`core.counting_server`).
    """

    kinds = frozenset({Kind.REPLY})

    def __init__(self, engine: WorkerEngine) -> None:
        self._inner = engine.owners[Kind.REPLY]
        self._lock = engine.lock
        self._newer_than = 0
        """The last step of which an answer was newer, or 0."""
        self.late_slices = 0
        """Answers of a later step than was pushed."""
        self.late_steps = 0
        """Steps whose pushes were not to count, for that."""
        self._counted_step = 0
        engine.owners[Kind.REPLY] = self
        engine.flags_of = self.flags_of

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
