"""Where the loaders of a member are when another worker joins: told by members to who joins.

All members tell it when they have ended the step before its first one, each to all servers; a
server passes the first one on. So any one of them may be lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec

from foreprop.core.dealing import PassProgress
from foreprop.core.decoding import decoded
from foreprop.core.membershipwords import MembershipWord
from foreprop.errors import RemoteProtocolError

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Name = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]
"""Of a rank or server: JSON has no other keys."""


class PassPosition(msgspec.Struct, frozen=True, array_like=True):
    """Of one loader, by the order in which `foreprop.shard` was called."""

    loader: _Number
    epoch: _Number
    """Of the pass under way, or of the next one."""
    progress: PassProgress | None
    """Of the pass under way."""


class Positions(msgspec.Struct, frozen=True, array_like=True):
    """What a newcomer has to know to go on with the others' passes."""

    loaders: tuple[PassPosition, ...]
    said: dict[_Name, dict[_Name, list[MembershipWord]]]
    """Of all members so far, by rank and server."""

    def words(self) -> dict[int, dict[int, list[MembershipWord]]]:
        return {
            int(rank): {int(server): words for server, words in by_server.items()}
            for rank, by_server in self.said.items()
        }


_POSITIONS = msgspec.json.Decoder(Positions)


def decode_positions(payload: memoryview, workers: int) -> Positions:
    """Raises `RemoteProtocolError` for what no member of so many workers can have said."""
    told = decoded(_POSITIONS, payload, "where loaders are")
    ranks = set(told.words())
    for loader in told.loaders:
        if loader.progress is not None:
            _check(loader.progress)
            ranks |= _ranks_of(loader.progress)
    if not all(0 <= rank < workers for rank in ranks):
        raise RemoteProtocolError(f"not where loaders are: rank {max(ranks)} of {workers}")
    return told


def _check(progress: PassProgress) -> None:
    batches = [deal.batch for deal in progress.deals]
    if (
        not 0 <= progress.given <= progress.drawn
        or batches[:1] != [0]
        or batches != sorted(batches)
        or not all(deal.members for deal in progress.deals)
    ):
        raise RemoteProtocolError(f"not where a loader is: {progress}"[:200])


def _ranks_of(progress: PassProgress) -> set[int]:
    found: set[int] = {change.rank for change in progress.applied}
    for deal in progress.deals:
        members: Collection[int] = deal.members
        found |= {*members, *deal.joined, *(rank for rank, _ in deal.owed)}
    return found
