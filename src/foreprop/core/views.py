"""Who is a member, where workers update: views, and how members agree on the next one.

A *member* is a node: its workers and the server beside them, which come and go whole. Its number is
used once: who comes again to the same *slot* is another member (`SLOTS`). A *view* is a number and
a list of members. Every frame carries its view's number, and frames of another view are dropped.
What a member may do depends on its view alone, so two halves never train on.

Theory of operation. Each member notes what it finds, and passes on what it has heard:

- A member is *dead* if its kernel says that the process is no more: the connection has ended, and
  the port that it listened on refuses. (The end alone may be that of who has been left out.) That
  is a fact, and the dead count for nobody.
- A member is *silent* if nothing is heard of it, or if it does not vote in time; also if a
  connection has ended and the process is there. That is an accusation: a pair (who, whom). The
  accused goes; of two who accuse each other, the one with more accusers, or the higher number.
- Who asks to come is *joining*.

So what is known gives each member the view that it wants: all without the dead, without the
accused, and with those who join. It *votes* for that: it leaves its view for good (nothing of it is
sent or taken any more), and tells the others what it knows and which attempt, by number and
members, it votes for. When all members of an attempt have voted for it, the view is *formed*; who
sees that tells all who are in it or were before, ahead of any frame of it. If somebody goes
meanwhile, what is known changes, and the rest vote again. A member's numbers only grow, and it
never goes back to an attempt.

Quorum. Two views with one predecessor would be two halves. So a member votes only for a *quorum* of
its last view and of every attempt since then that it has voted for, as any of those may have been
formed (Keidar and Dolev, Efficient message ordering in dynamic networks, 1996; Yeger Lotem, Keidar
and Dolev, Dynamic voting for consistent primary components, 1997). A quorum is more than half, or
exactly half with the lowest number, where the dead count against it; or all but the dead, where
nobody is merely silent. Any two quorums have a member in common, or all of one are dead. Whose wish
is no quorum ends and says so.

A newcomer counts from step J on: two after the last step that any voter had begun. As voters finish
no step before the view is formed, all know of it before they end step J - 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from foreprop.errors import InternalError

SLOTS = 2**16
"""A member is its slot (the rank of its first worker), and so much more each time that one comes
to it: so who was there at the start has the lowest numbers."""
LEAST_LEAD_STEPS = 2
"""A newcomer's first step is so many after the last that a voter had begun."""


class View(NamedTuple):
    """Who is a member. As a frame: somebody has seen that it is formed."""

    number: int
    after: int
    """The number of the view that it was formed from."""
    members: tuple[int, ...]
    """Ascending."""
    since: tuple[int, ...]
    """By place in ``members``: the first step that counts them."""

    def counting(self, step: int) -> tuple[int, ...]:
        """The members that a round of this step waits for."""
        return tuple(m for m, first in zip(self.members, self.since, strict=True) if first <= step)


def first_view(members: Collection[int]) -> View:
    """With which a session begins."""
    return View(0, -1, tuple(sorted(members)), (0,) * len(members))


def is_quorum(some: Collection[int], of: Sequence[int], dead: Collection[int]) -> bool:
    """Whether these may go on without the others ``of`` a view or an attempt."""
    inside = [member for member in of if member in some]
    if all(member in inside or member in dead for member in of):
        return bool(inside)
    return 2 * len(inside) > len(of) or (2 * len(inside) == len(of) and min(of) in inside)


def owner_of(slice_: int, home: int, view: View) -> int:
    """Whose server has a slice: who is in its home slot, or else one of the others, in turn."""
    at_home = [member for member in view.members if member % SLOTS == home]
    return at_home[0] if at_home else view.members[slice_ % len(view.members)]


def slices_of(member: int, view: View, homes: Mapping[int, int]) -> list[int]:
    """Those that a member's server has."""
    return [slice_ for slice_, home in homes.items() if owner_of(slice_, home, view) == member]


class Vote(NamedTuple):
    """A frame: what a member knows, and the attempt that it votes for."""

    sender: int
    base: View
    """The last view that it knows to be formed."""
    number: int
    members: tuple[int, ...]
    dead: frozenset[int]
    silent: frozenset[tuple[int, int]]
    """Accusations: who, whom."""
    joining: frozenset[int]
    step: int
    """The last one that it has begun."""


# Events; frames are events where they arrive.
class MemberDied(NamedTuple):
    """Its kernel says that the process is no more."""

    member: int


class MemberSilent(NamedTuple):
    """This member hears nothing of it, or waits too long for its vote."""

    member: int


class AdmissionAsked(NamedTuple):
    """A node that is no member wants to come, and has its connections to all of them."""

    member: int


class StepBegun(NamedTuple):
    """This member has begun to compute this step."""

    step: int


# Instructions.
class LeaveView(NamedTuple):
    """Send nothing and take nothing any more of the view with this number."""

    number: int


class SendTo(NamedTuple):
    """To these members, on each connection in the order of instructions."""

    members: tuple[int, ...]
    frame: Any


class EnterView(NamedTuple):
    """Close the connections to the lost, then go on in this view: see `core.retention`."""

    view: View
    lost: tuple[int, ...]


class EndMember(NamedTuple):
    """This member cannot go on; say why, and end the process."""

    reason: str


ViewInstruction = LeaveView | SendTo | EnterView | EndMember


class ViewMachine:
    """One member's part in the agreement. Not thread-safe.

    ``view``: the one that it is in; None: it has asked to come.
    """

    def __init__(self, me: int, view: View | None) -> None:
        self.me = me
        self.base = view
        """The last view that is known to be formed."""
        self.has_ended = False
        self._number = view.number if view else -1  # of its last vote, or of its view
        self._attempts: list[tuple[int, tuple[int, ...]]] = []  # that it has voted for since
        self._votes: dict[int, Vote] = {}  # the last of each, with this base
        self._dead: set[int] = set()
        self._silent: set[tuple[int, int]] = set()
        self._joining: set[int] = set() if view else {me}
        self._step = 0

    def handle(self, event: Any) -> list[ViewInstruction]:
        """The only way state changes. Who has ended says nothing more."""
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise InternalError(f"the agreement on views does not know the event {event!r}")
        return [] if self.has_ended else handler(self, event)

    @property
    def awaited(self) -> list[int]:
        """Whose votes for this member's attempt are missing: silent, if they take too long."""
        if not self._attempts:
            return []
        return [member for member in self._attempts[-1][1] if not self._agrees(member)]

    # What is found.
    def _on_member_died(self, event: MemberDied) -> list[ViewInstruction]:
        self._dead.add(event.member)
        return self._consider()

    def _on_member_silent(self, event: MemberSilent) -> list[ViewInstruction]:
        self._silent.add((self.me, event.member))
        return self._consider()

    def _on_admission_asked(self, event: AdmissionAsked) -> list[ViewInstruction]:
        slot = event.member % SLOTS
        if self.base is None or any(each % SLOTS == slot for each in self.base.members):
            return []  # who was there before is not known to be lost: it asks again
        self._joining.add(event.member)
        return self._consider()

    def _on_step_begun(self, event: StepBegun) -> list[ViewInstruction]:
        self._step = event.step
        return []

    # What is heard.
    def _on_vote(self, vote: Vote) -> list[ViewInstruction]:
        followed: list[ViewInstruction] = []
        if self.base is None or vote.base.number > self.base.number:
            if self.me not in {*vote.base.members, *vote.joining}:
                return []
            followed = self._learn(vote.base)
        elif vote.base.number < self.base.number:
            return [SendTo((vote.sender,), self.base)]
        self._dead |= vote.dead
        self._silent |= vote.silent
        self._joining |= vote.joining
        self._votes[vote.sender] = vote
        return followed + self._consider(vote)

    def _on_view(self, view: View) -> list[ViewInstruction]:
        if self.base is not None and view.number <= self.base.number:
            return []
        if self.me not in view.members:
            self.has_ended = True
            return [EndMember(f"the others went on without it, as {_listed(view)}")]
        return self._learn(view) + self._consider()

    def _learn(self, view: View) -> list[ViewInstruction]:
        """It is formed. Who has voted for a later attempt does not enter it: it goes on from it."""
        if self.me in view.members and self._number <= view.number:
            return self._enter(view)
        self.base = view
        self._attempts = [each for each in self._attempts if each[0] > view.number]
        self._number = max(self._number, view.number)
        self._votes.clear()
        return []

    # What follows.
    def _wanted(self) -> tuple[int, ...]:
        """The members of the next view, as far as is known."""
        if self.base is None:
            return ()
        kept = sorted({*self.base.members, *self._joining} - self._dead)
        while True:
            accused = Counter(b for a, b in self._silent if a in kept and b in kept)
            if not accused:
                return tuple(kept)
            kept.remove(max(accused, key=lambda member: (accused[member], member)))

    def _consider(self, heard: Vote | None = None) -> list[ViewInstruction]:
        """Vote, if another view is wanted than the one that it is in or has voted for."""
        wanted = self._wanted()
        if self.base is None:
            return []
        if self.me not in wanted:  # the others go on without it, and tell, if it hears them
            hears = any((self.me, member) not in self._silent for member in wanted)
            return [] if hears else self._end((self.me,))
        voted = self._votes.get(self.me)  # gone, if the view that it was for is not the last one
        follows = heard is not None and heard.members == wanted and heard.number > self._number
        if not self._votes and not self._attempts and wanted == self.base.members:
            return []  # nobody has left it
        if voted and wanted == voted.members and not follows:
            return self._form()
        earlier = [self.base.members, *(members for _, members in self._attempts)]
        if not all(is_quorum(wanted, members, self._dead) for members in earlier):
            return self._form() if self._can_wait() else self._end(wanted)
        heard_number = heard.number if heard else -1
        number = heard_number if follows else max(self._number, heard_number) + 1
        return [*self._vote(number, wanted, self.base), *self._form()]

    def _vote(self, number: int, members: tuple[int, ...], base: View) -> list[ViewInstruction]:
        is_in = self.me in base.members and not self._attempts
        left: list[ViewInstruction] = [LeaveView(base.number)] if is_in else []
        self._number = number
        self._attempts.append((number, members))
        known = frozenset(self._dead), frozenset(self._silent), frozenset(self._joining)
        vote = Vote(self.me, base, number, members, *known, self._step)
        self._votes[self.me] = vote
        others = tuple(member for member in members if member != self.me)
        return [*left, SendTo(others, vote)] if others else left

    def _can_wait(self) -> bool:
        """Whether the attempt that it has voted for may still be formed."""
        if not self._attempts:
            return False
        members = self._attempts[-1][1]
        accused = any(a in members and b in members for a, b in self._silent)
        return not (accused or self._dead & set(members))

    def _agrees(self, member: int) -> bool:
        vote = self._votes.get(member)
        return vote is not None and (vote.number, vote.members) == self._attempts[-1]

    def _form(self) -> list[ViewInstruction]:
        """Enter the view if all its members have voted for it."""
        if self.base is None or not self._attempts or self.awaited:
            return []
        number, members = self._attempts[-1]
        first = LEAST_LEAD_STEPS + max(self._votes[member].step for member in members)
        known = dict(zip(self.base.members, self.base.since, strict=True))
        since = tuple(known.get(member, first) for member in members)
        return self._enter(View(number, self.base.number, members, since))

    def _enter(self, view: View) -> list[ViewInstruction]:
        attempted = {member for _, members in self._attempts for member in members}
        before = attempted.union(self.base.members if self.base else ())
        lost = before - set(view.members)
        told = tuple(sorted((before | set(view.members)) - self._dead - {self.me}))
        self.base, self._number = view, view.number
        self._attempts.clear()
        self._votes.clear()
        self._joining -= {*view.members, *self._dead}
        rest = {*view.members, *self._joining}
        self._dead &= rest
        self._silent = {pair for pair in self._silent if rest.issuperset(pair)}
        entered = EnterView(view, tuple(sorted(lost)))
        return [*([SendTo(told, view)] if told else []), entered, *self._consider()]

    def _end(self, wanted: tuple[int, ...]) -> list[ViewInstruction]:
        self.has_ended = True
        there = f"members {list(wanted)} of {_listed(self.base)}" if self.base else "nobody"
        return [
            EndMember(
                f"only {there} can be reached, and that is no majority: the others may have gone on"
                " without them. Start this node again when it reaches the others, or all from a"
                " checkpoint"
            )
        ]


_HANDLERS: dict[type, Callable[[ViewMachine, Any], list[ViewInstruction]]] = {
    MemberDied: ViewMachine._on_member_died,
    MemberSilent: ViewMachine._on_member_silent,
    AdmissionAsked: ViewMachine._on_admission_asked,
    StepBegun: ViewMachine._on_step_begun,
    Vote: ViewMachine._on_vote,
    View: ViewMachine._on_view,
}


def _listed(view: View) -> str:
    return f"view {view.number} with members {list(view.members)}"
