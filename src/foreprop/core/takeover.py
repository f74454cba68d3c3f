"""A lost server's slices go on at others: from which round, and what has to be sent once more.

Theory of operation. Where workers update, a server holds nothing but the pushes of open rounds: all
values and all optimizer state are with every worker. Of each slice a worker keeps

- a push's bytes until it is answered;
- the last average, whole and beside the gradient, until the slice's next average comes. All have
  pushed for that one, and so all have had the one before.

So of any two workers none is more than one round ahead, and what the last one lacks is somewhere:
the average with who has it, or, if nobody has, all pushes.

Each slice has an order of servers, and is owned by the first that lives (`owner_of`): one that is
lost changes nothing for slices that are not its own, whoever else has been lost. A worker closes
its connection to a lost server, and then *claims* the slices at their next owner: it says which
round's average it has. When all members that the owner knows have claimed a slice, it is *settled*:
it goes on after the newest round that any of them has. Who lacks that round's average is *owed* it:
one who has it gives it to the owner, which passes it on. A push of the round after it is sent again
to the new owner.

A second loss changes who is awaited. If it takes the giver, another one gives; if nobody else has
that average, nobody has used it, and the slice is settled anew: one round earlier, of which all
send their pushes again.

A lost server may have dropped a worker that never heard of it, and gone on without. One that is
more than a round behind cannot be helped: it is refused, or it is answered about another round than
it awaits, and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from foreprop.core.collect import Round
from foreprop.core.frames import RESTS
from foreprop.core.slicing import Slice
from foreprop.errors import RemoteProtocolError

NOBODY = -1


def owner_of(slice_: int, home: int, servers: int, lost: Collection[int]) -> int:
    """Whose a slice is: its home server's, or the first of the others that lives; or `NOBODY`.

    Each slice has an order of the others of its own, so that the lost one's share is divided.
    """
    if home not in lost:
        return home
    first = slice_ % max(servers - 1, 1)
    for turn in range(servers - 1):
        server = (home + 1 + (first + turn) % (servers - 1)) % servers
        if server not in lost:
            return server
    return NOBODY


# Events, of a server.
class SlicesSettled(NamedTuple):
    """These are this server's from now on, and go on after these rounds."""

    pieces: tuple[Slice, ...]
    rounds: Mapping[int, Round]


Step = Annotated[int, msgspec.Meta(ge=-1, lt=2**32)]
Again = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]


class Claim(NamedTuple):
    """The last round of a slice whose average a worker has."""

    slice: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    step: Step
    again: Again


class Settled(NamedTuple):
    """Where a slice goes on."""

    slice: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    step: Step
    again: Again
    """The newest round that a survivor has the average of."""
    giver: Annotated[int, msgspec.Meta(ge=-1, lt=2**16)]
    """Who is to give that, or `NOBODY`: none is owed it."""

    @property
    def round(self) -> Round:
        return self.step, self.again


class _Claimed:
    """One slice."""

    __slots__ = ("by", "giver", "is_settled", "owed", "round")

    def __init__(self) -> None:
        self.by: dict[int, Round] = {}
        self.is_settled = False
        self.round = RESTS
        self.giver = NOBODY  # who has still to give
        self.owed: tuple[int, ...] = ()


class Takeovers:
    """Collects the claims on slices that come to one server. Not thread-safe.

    ``awaited``: the members now, all of whom have to claim.
    """

    def __init__(self, awaited: Callable[[], Collection[int]]) -> None:
        self._awaited = awaited
        self._slices: dict[int, _Claimed] = {}

    def missing(self) -> list[int]:
        """Who has not claimed what others have."""
        open_ = [each for each in self._slices.values() if not each.is_settled]
        return sorted({m for each in open_ for m in self._awaited() if m not in each.by})

    def add(self, member: int, claims: Sequence[Claim]) -> list[Settled]:
        """Returns what is settled by them. `RemoteProtocolError` leaves everything as it was."""
        said = {claim.slice: (claim.step, claim.again) for claim in claims}
        for slice_, round_ in said.items():
            known = self._slices.get(slice_)
            if known is None:
                continue
            if known.is_settled or member in known.by:
                raise RemoteProtocolError(f"rank {member} claims slice {slice_} out of turn")
            for other, theirs in known.by.items():
                if RESTS not in (round_, theirs) and round_[0] < theirs[0] - 1:
                    raise RemoteProtocolError(
                        f"rank {member} has round {round_} of slice {slice_}, and rank {other}"
                        f" round {theirs}: nobody can be more than one behind"
                    )
        for slice_, round_ in said.items():
            self._slices.setdefault(slice_, _Claimed()).by[member] = round_
        return self._settle_all(said)

    def drop(self, member: int) -> list[Settled]:
        """It is lost, too, and not ``awaited`` any more: what is settled by that, or anew."""
        for each in self._slices.values():
            each.by.pop(member, None)
            each.owed = tuple(other for other in each.owed if other != member)
        return self._settle_all(
            [
                slice_
                for slice_, each in self._slices.items()
                if each.by and (not each.is_settled or each.giver == member)
            ]
        )

    def _settle_all(self, slices: Collection[int]) -> list[Settled]:
        awaited = self._awaited()
        found = []
        for slice_ in slices:
            each = self._slices[slice_]
            if not all(member in each.by for member in awaited):
                continue
            each.is_settled = True
            each.round = newest = max(each.by.values())
            having = [member for member in sorted(each.by) if each.by[member] == newest]
            each.owed = tuple(m for m in sorted(each.by) if RESTS != each.by[m] < newest)
            each.giver = having[0] if each.owed else NOBODY
            found.append(Settled(slice_, *newest, each.giver))
        return found

    def check_given(self, member: int, slice_: int, round_: Round) -> None:
        """Raises `RemoteProtocolError` for an average that the member was not to give."""
        each = self._slices.get(slice_)
        if each is None or each.giver != member or each.round != round_:
            raise RemoteProtocolError(
                f"rank {member} gave round {round_} of slice {slice_}, out of turn"
            )

    def given(self, slice_: int) -> tuple[int, ...]:
        """Its average is here: nobody has to give it any more. Returns who is owed it."""
        each = self._slices[slice_]
        each.giver = NOBODY
        return each.owed
