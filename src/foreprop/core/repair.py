"""What a server does where workers update: it sums open rounds, and repairs them after a loss.

Theory of operation. A server owns some slices of each view, and holds nothing of them but the
pushes of open rounds. A round is *closed* when all members that count in its step have pushed it:
the average is over exactly those. It is encoded once, so all decode the same bytes.

In a new view each member claims each slice (`core.retention`). Before all have claimed an owner
closes nothing. Then, per slice, the *newest* round that anybody has the average of is done, and

- who has pushed that round and lacks its average gets it: one that has it is asked to give it (the
  owner's own node, if it can: that crosses no link), and the owner passes it on;
- a push of the round after it is sent again, the same bytes, unless the owner has it already.

Nothing else is lost: nobody is more than one round ahead. What the owner made of a round that
nobody has an average of is forgotten: the round is made anew, of the members of this view, with the
residual as before (it follows itself, so it has not counted). A new owner begins with an empty
residual.

A second loss makes a new view, in which all claim again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from foreprop.core.collect import NEVER, Round
from foreprop.core.retention import (
    Average,
    Claim,
    Claims,
    Contribution,
    Residual,
    SettleResidual,
    ViewEntered,
    Wanted,
)
from foreprop.core.views import SendTo, View, slices_of
from foreprop.errors import InternalError, RemoteProtocolError


# Instructions.
class CloseRound(NamedTuple):
    """Add up the contributions in the order of slots, and divide by the number of workers.

    Encode that once, with the residual, and send the `Average` to the members that count.
    """

    slice: int
    round: Round
    view: int
    counted: tuple[int, ...]
    workers: int
    having: tuple[int, ...]
    """The members that had a gradient; empty: the average is that there is none."""


class EmptyResidual(NamedTuple):
    """The slice is this server's from now on: a line of the log of what was counted."""

    slice: int


RepairInstruction = SendTo | CloseRound | SettleResidual | EmptyResidual


class _Owned:
    """What a server has of one slice."""

    __slots__ = ("done", "lacking", "pushed", "residual")

    def __init__(self) -> None:
        self.done = NEVER
        self.pushed: dict[int, Contribution] = {}  # of the round after it, by member
        self.lacking: tuple[int, ...] = ()  # those that wait for an average that is asked for
        self.residual = Residual()


class Repair:
    """One server's slices. Not thread-safe. ``homes``: by slice, the slot of its server."""

    def __init__(self, me: int, view: View, homes: Mapping[int, int]) -> None:
        self._me = me
        self._view = view
        self._homes = homes
        self._owned = {slice_: _Owned() for slice_ in slices_of(me, view, homes)}
        self._claims: dict[int, dict[int, Claim]] | None = None
        """By member and slice, while some are missing."""

    def handle(self, event: Any) -> list[RepairInstruction]:
        """The only way state changes; `RemoteProtocolError` leaves it as it was."""
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise InternalError(f"a server's repair does not know the event {event!r}")
        return handler(self, event)

    def missing(self) -> dict[int, list[int]]:
        """By slice with an open round, or with claims: whom it waits for."""
        if self._claims is not None:
            absent = [m for m in self._view.members if m not in self._claims]
            return dict.fromkeys(self._owned, absent)
        return {
            slice_: [m for m in self._waits_for(owned) if m not in owned.pushed]
            for slice_, owned in self._owned.items()
            if owned.pushed
        }

    def _waits_for(self, owned: _Owned) -> tuple[int, ...]:
        return self._view.counting(next(iter(owned.pushed.values())).round[0])

    # Views.
    def _on_view_entered(self, event: ViewEntered) -> list[RepairInstruction]:
        view, before = event.view, self._view
        if view.number <= before.number:
            return []  # another worker has told it
        kept = self._owned if view.after == before.number else {}
        owned = slices_of(self._me, view, self._homes)
        self._view, self._claims = view, {} if owned else None
        self._owned = {slice_: kept.get(slice_) or _Owned() for slice_ in owned}
        return [EmptyResidual(slice_) for slice_ in owned if slice_ not in kept]

    def _is_past(self, view: int) -> bool:
        """Whether a frame is of another view than this server is in."""
        return view != self._view.number

    def _on_claims(self, event: Claims) -> list[RepairInstruction]:
        member, view, said = event
        if self._is_past(view):
            return []
        claims = {claim.slice: claim for claim in said}
        if self._claims is None or member in self._claims or claims.keys() != self._owned.keys():
            raise RemoteProtocolError(f"member {member} claims slices {list(claims)} out of turn")
        self._claims[member] = claims
        if len(self._claims) < len(self._view.members):
            return []
        everybody, self._claims = self._claims, None
        followed: list[RepairInstruction] = []
        for slice_, owned in self._owned.items():
            by_member = {member: everybody[member][slice_] for member in self._view.members}
            followed += self._settle(slice_, owned, by_member)
        return followed

    def _settle(
        self, slice_: int, owned: _Owned, claims: Mapping[int, Claim]
    ) -> list[RepairInstruction]:
        """All have claimed: the round that the slice goes on from, and what is missing."""
        about = self._me, self._view.number, slice_
        newest = owned.done = max(claim.answered for claim in claims.values())
        having = [member for member, claim in claims.items() if claim.answered == newest]
        lacking = [m for m in self._view.counting(newest[0]) if m not in having]
        if any(claims[member].pushed != newest for member in lacking):
            raise RemoteProtocolError(
                f"slice {slice_}: {dict(claims)}: nobody can be more than one round behind"
            )
        owned.lacking = tuple(lacking)
        followed: list[RepairInstruction] = []
        if lacking:
            giver = self._me if self._me in having else having[0]
            followed.append(SendTo((giver,), Wanted(*about, newest)))
        here = owned.pushed
        owned.pushed = {member: here[member] for member in claims if member in here}
        for member, claim in claims.items():
            if claim.pushed > newest and member not in here:
                followed.append(SendTo((member,), Wanted(*about, claim.pushed)))
        return [*followed, *self._maybe_close(slice_, owned)]

    # Rounds.
    def _on_contribution(self, event: Contribution) -> list[RepairInstruction]:
        member, view, slice_, round_ = event[:4]
        if self._is_past(view):
            return []
        owned = self._owned_of(slice_)
        if self._claims is None:
            others = {each.round for each in owned.pushed.values()} - {round_}
            if round_ <= owned.done or member in owned.pushed or others:
                raise RemoteProtocolError(
                    f"member {member} pushed round {round_} of slice {slice_}, of which"
                    f" {owned.done} is done, and {list(owned.pushed.values())} are here"
                )
        owned.pushed[member] = event
        return self._maybe_close(slice_, owned)

    def _maybe_close(self, slice_: int, owned: _Owned) -> list[RepairInstruction]:
        if self._claims is not None or not owned.pushed:
            return []
        counted = self._waits_for(owned)
        if not owned.pushed.keys() >= set(counted):
            return []
        pushes = [owned.pushed[member] for member in counted]
        round_ = owned.done = pushes[0].round
        owned.pushed.clear()
        having = tuple(push.member for push in pushes if push.has_gradient)
        followed: list[RepairInstruction] = [*owned.residual.follow(slice_, round_)]
        if having:
            owned.residual.open = round_
        workers = sum(push.workers for push in pushes)
        about = slice_, round_, self._view.number, counted, workers, having
        return [*followed, CloseRound(*about)]

    def _on_average(self, average: Average) -> list[RepairInstruction]:
        member, view, slice_, round_ = average
        if self._is_past(view):
            return []
        owned = self._owned_of(slice_)
        if not owned.lacking or round_ != owned.done:
            raise RemoteProtocolError(
                f"member {member} gave round {round_} of slice {slice_}, which nobody has asked for"
            )
        lacking, owned.lacking = owned.lacking, ()
        return [SendTo(lacking, Average(self._me, view, slice_, round_))]

    def _owned_of(self, slice_: int) -> _Owned:
        owned = self._owned.get(slice_)
        if owned is None:
            raise RemoteProtocolError(f"slice {slice_} is not this server's in this view")
        return owned


_HANDLERS: dict[type, Callable[[Repair, Any], list[RepairInstruction]]] = {
    ViewEntered: Repair._on_view_entered,
    Claims: Repair._on_claims,
    Contribution: Repair._on_contribution,
    Average: Repair._on_average,
}
