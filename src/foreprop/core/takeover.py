"""A lost server's slices go on at other servers: from which round, and what is sent once more.

Theory of operation. Where workers update, a server holds nothing but the pushes of open rounds: all
values and all optimizer state are with every worker. For each slice a worker keeps

- a push's bytes until it is answered;
- the last average, whole and beside the gradient, until the slice's next average comes. All workers
  have pushed for that one, and so all have had the one before.

So no worker is more than one round ahead of another, and what the last one lacks is somewhere: the
average with a worker that has it, or, if none has, all pushes.

Each slice has an order of servers, and its owner is the first that lives (`owner_of`): the loss of
a server changes nothing for slices that it did not own, whichever others have been lost. A worker
closes its connection to a lost server, and then *claims* the slices at their next owner: it says
which round's average it has. When all members that the owner knows have claimed a slice, it is
*settled*: it goes on after the newest round whose average any of them has. A worker without that
average is *owed* it: one that has it gives it to the owner, which passes it on. A push of the round
after it is sent again to the new owner.

A second loss changes whose claims are awaited. If the giver is lost, another worker gives; if none
has that average, nobody has used it, and the slice is settled anew: one round earlier, of which all
send their pushes again.

**Moves.** A server that lives can give slices away in the same way (``rebalance_s``). All workers
know before which round a slice *moves* to the next server in its order; the server that had it
becomes the last. Each worker claims it there when it has the average of the round before. So a
worker claims at the same server whether it has heard of the move, of the old owner's loss, or of
both. A slice goes further in several moves, no two of them before the same round. All that must
know a plan of moves hear it long before its first step (`LEAD_STEPS`), from whoever has heard it:
so all do what it says before the same step.

A lost server may have dropped a worker that never heard of it, and gone on without. A worker that
is more than a round behind cannot be helped: it is refused, or it is answered about another round
than it awaits, and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from foreprop.core.frames import PACE_STEPS, RESTS, Round
from foreprop.core.slicing import Slice
from foreprop.errors import RemoteProtocolError

NOBODY = -1
EVERY = 2**32  # higher than any step


def owner_of(slice_: int, home: int, servers: int, lost: Collection[int], moves: int = 0) -> int:
    """The server of a slice after so many moves: the first in its order that lives, or `NOBODY`.

    The order begins with the slice's ``home``. Each slice has an order of its own, so that a lost
    server's share is divided.
    """
    for place in range(moves, moves + servers):
        server = server_at(slice_, home, servers, place)
        if server not in lost:
            return server
    return NOBODY


def server_at(slice_: int, home: int, servers: int, place: int) -> int:
    """The server at this place in a slice's order."""
    place %= servers
    return (home + 1 + (slice_ + place - 1) % (servers - 1)) % servers if place else home


# Events that only servers know.
class SlicesSettled(NamedTuple):
    """These slices are this server's from now on, and go on after these rounds."""

    pieces: tuple[Slice, ...]
    rounds: Mapping[int, Round]


Step = Annotated[int, msgspec.Meta(ge=-1, lt=2**32)]
Again = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]


class Claim(NamedTuple):
    """A worker says which is the last round of a slice whose average it has."""

    slice: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    step: Step
    again: Again


class Settled(NamedTuple):
    """A slice goes on after the newest round whose average a survivor has.

    ``giver`` must give that average; `NOBODY` if none is owed it.
    """

    slice: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    step: Step
    again: Again
    giver: Annotated[int, msgspec.Meta(ge=-1, lt=2**16)]

    @property
    def round(self) -> Round:
        return self.step, self.again


class _Claimed:
    """The claims on one slice, and what is settled by them."""

    __slots__ = ("by", "first", "giver", "is_settled", "owed", "round")

    def __init__(self) -> None:
        self.first = 0  # the step before which it moves, or `EVERY`
        self.by: dict[int, Round] = {}
        self.is_settled = False
        self.round = RESTS
        self.giver = NOBODY  # that has not given yet
        self.owed: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.is_settled and self.giver == NOBODY


class Takeovers:
    """Collects the claims on slices that come to one server. Not thread-safe.

    ``awaited`` gives the members that take part in a step, all of whom have to claim; for `EVERY`
    step these are all members, also those whose first step is still to come.
    """

    def __init__(self, awaited: Callable[[int], Collection[int]]) -> None:
        self._awaited = awaited
        self._slices: dict[int, _Claimed] = {}

    def missing(self) -> list[int]:
        """The members that have not claimed what others have."""
        open_ = [each for each in self._slices.values() if not each.is_settled]
        return sorted({m for each in open_ for m in self._awaited(each.first) if m not in each.by})

    def add(self, member: int, claims: Sequence[Claim], first: int = EVERY) -> list[Settled]:
        """Note claims; returns what they settle. `RemoteProtocolError` leaves all as it was.

        The slices move before the step ``first``; `EVERY`: their server is lost. A slice that was
        settled here before has moved on since, and comes back.
        """
        said = {claim.slice: (claim.step, claim.again) for claim in claims}
        for slice_, round_ in said.items():
            known = self._slices.get(slice_)
            if known is None or known.is_over:
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
            known = self._slices.get(slice_)
            if known is None or known.is_over:
                known = self._slices[slice_] = _Claimed()
            known.by[member] = round_
            known.first = max(known.first, first)
        return self._settle_all(said)

    def drop(self, member: int) -> list[Settled]:
        """Note that a member is lost, too; returns what that settles, perhaps once more."""
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
        found = []
        for slice_ in slices:
            each = self._slices[slice_]
            if not all(member in each.by for member in self._awaited(each.first)):
                continue
            each.is_settled = True
            each.round = newest = max(each.by.values())
            having = [member for member in sorted(each.by) if each.by[member] == newest]
            each.owed = tuple(m for m in sorted(each.by) if RESTS != each.by[m] < newest)
            each.giver = having[0] if each.owed else NOBODY
            found.append(Settled(slice_, *newest, each.giver))
        return found

    def claimed(self, slice_: int) -> Collection[int]:
        return self._slices[slice_].by.keys()

    def check_given(self, member: int, slice_: int, round_: Round) -> None:
        """Raise `RemoteProtocolError` for an average that the member must not give."""
        each = self._slices.get(slice_)
        if each is None or each.giver != member or each.round != round_:
            raise RemoteProtocolError(
                f"rank {member} gave round {round_} of slice {slice_}, out of turn"
            )

    def given(self, slice_: int) -> tuple[int, ...]:
        """Note that a slice's average was given; returns the members that are owed it."""
        each = self._slices[slice_]
        each.giver = NOBODY
        return each.owed


# Where servers are to own other shares: slices move, one place in their orders after another.
LEAD_STEPS = PACE_STEPS
"""A plan is passed on for so many steps: in each of them one that passes it on may die."""

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class MovePlan(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What all do before the step ``first``, as a rank has planned it.

    ``moves`` are how many moves each slice is to have made in all, of which it makes one before
    each step; empty: links are measured.
    """

    first: _Number
    by: _Number
    moves: tuple[_Number, ...] = ()


class MoveState(msgspec.Struct, frozen=True, array_like=True):
    """What a newcomer has to know of moves, before those of its first step.

    Each slice has ``made`` so many moves of those ``wanted``; ``plans`` are for later steps.
    """

    made: tuple[_Number, ...]
    wanted: tuple[_Number, ...]
    plans: tuple[MovePlan, ...]


def loads_of(
    slices: Sequence[Slice],
    moves: Sequence[int],
    *,
    servers: int,
    lost: Collection[int] = (),
) -> list[int]:
    loads = [0] * servers
    for piece, made in zip(slices, moves, strict=True):
        loads[owner_of(piece.number, piece.server, servers, lost, made)] += piece.elems
    return loads


def plan_moves(
    slices: Sequence[Slice],
    moves: Sequence[int],
    shares: Sequence[int],
    *,
    lost: Collection[int] = (),
) -> list[int]:
    """How many moves each slice is to have made in all, so that servers own these ``shares``.

    It has made ``moves``. Shares are relative to each other, and 0 for the ``lost``. A slice moves
    no further than it must, and only from a server that has too much to one that has too little.
    """
    servers = len(shares)
    planned = list(moves)
    loads = loads_of(slices, moves, servers=servers, lost=lost)
    wanted = [sum(loads) * share / sum(shares) for share in shares]
    for distance in range(1, servers):
        for number, piece in enumerate(slices):
            about = (number, piece.server, servers)
            owner = owner_of(*about, lost, planned[number])
            to = server_at(*about, planned[number] + distance)
            has_too_much = loads[owner] - piece.elems / 2 >= wanted[owner]
            if to not in lost and has_too_much and loads[to] + piece.elems / 2 <= wanted[to]:
                loads[owner] -= piece.elems
                loads[to] += piece.elems
                planned[number] += distance
    return planned
