"""A server that takes over a lost one's slices, where workers update: see `core.takeover`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from foreprop.config import LOGGER
from foreprop.core.decoding import decoded
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.slicing import Slice
from foreprop.core.takeover import Claim, Settled, SlicesSettled, Takeovers
from foreprop.core.wire import ROUND_SHIFT, Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, bounded, exactly

if TYPE_CHECKING:
    from foreprop.elastic.counting import Counting
    from foreprop.path.executor import Executor

LIMIT_BYTES = 1 << 26
_CLAIMS = msgspec.json.Decoder(list[Claim])
_SETTLED = msgspec.json.Decoder(list[Settled])


def decode_settled(payload: memoryview) -> list[Settled]:
    return decoded(_SETTLED, payload, "what was settled")


class TakenOver:
    """Owns claims, and averages that survivors give; for one server of ``counting``."""

    kinds = frozenset({Kind.CLAIM, Kind.TAKEN_OVER})

    def __init__(self, slices: Sequence[Slice], index: int, counting: Counting) -> None:
        self._slices = slices
        self._index = index
        self._counting = counting
        self._members = counting.members
        self._takeovers = Takeovers(lambda: self._members.settled)
        self._known: set[int] = set()
        """Slices that have been settled here."""

    def begin(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = executor.lock

    # Frames.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.CLAIM:
            return bounded(header, LIMIT_BYTES)
        slice_, round_ = header.slice, (header.step, header.flags >> ROUND_SHIFT)
        with self._lock:
            self._takeovers.check_given(peer.number, slice_, round_)
        if header.flags & Flag.UNCHANGED:
            return exactly(header, 0)
        return exactly(header, self._counting.store.size_bytes(slice_, value=True))

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.CLAIM:
            claims = decoded(_CLAIMS, payload, "claims")
            self._on_claims(peer.number, claims)
        else:
            self._pass_on(peer.number, header, payload)

    # What it waits for: a `link.connection.Collecting`.
    def __contains__(self, number: int) -> bool:
        """Whether it is a slice that may come here, and has not."""
        return self._may_come(number) and number not in self._known

    def _may_come(self, number: int) -> bool:
        return 0 <= number < len(self._slices) and self._slices[number].server != self._index

    def incomplete(self) -> Sequence[tuple[int, int]]:
        """Workers that wait for it say so themselves."""
        return []

    def describe_wait(self, number: int, step: int) -> str:
        return f"a slice of a lost server waits for the claims of ranks {self._takeovers.missing()}"

    def _on_claims(self, rank: int, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if not self._may_come(claim.slice):
                raise RemoteProtocolError(f"rank {rank} claims slice {claim.slice}")
        with self._lock:
            if rank in self._members.here:  # or it has been dropped meanwhile
                self._settle(self._takeovers.add(rank, claims))

    def drop(self, rank: int) -> None:
        """It is not a member any more. With the lock held."""
        self._settle(self._takeovers.drop(rank))

    def _settle(self, settled: Sequence[Settled]) -> None:
        """With the lock held: all is here that a push needs, before anybody is told to push."""
        if not settled:
            return
        pieces = tuple(self._slices[each.slice] for each in settled)
        new = [piece for piece in pieces if piece.number not in self._known]
        self._known.update(piece.number for piece in new)
        self._counting.adopt(new)
        self._counting.agreed()
        rounds = {each.slice: each.round for each in settled}
        self._counting.machine.handle(SlicesSettled(pieces, rounds))
        if new:
            LOGGER.warning("server %d takes over %d slices", self._index, len(new))
        data = msgspec.json.encode(settled)
        for rank in sorted(self._members.settled):
            self._executor.send(rank, Kind.SETTLED, 0, CONTROL_PRIORITY, 0, data)

    def _pass_on(self, rank: int, header: Header, average: memoryview) -> None:
        """To who is owed it: as it is, for it is the average that others have, and no code."""
        with self._lock:
            if rank not in self._members.here:
                return  # it has been dropped meanwhile, and another one gives
            owed = self._takeovers.given(header.slice)
        flags = header.flags & Flag.UNCHANGED
        for rank in owed:
            about = (rank, Kind.REPLY, header.step, CONTROL_PRIORITY, header.slice)
            self._executor.send(*about, average, flags)
