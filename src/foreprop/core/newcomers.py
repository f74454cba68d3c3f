"""A worker that comes while others train: from which step it counts, and when it gets values.

Theory of operation. A newcomer *asks* every server to count it from a step J on. A server that has
closed a slice of step J - 2 or a later one says no, and which step it could promise. One that
promises closes no slice of step J - 2 until it hears more. If one of them says no, the newcomer
asks all again with a later J, which takes the place of the promise before. If all have promised it,
J is *settled*: each server tells all members, and counts the newcomer in every slice of J and of
later steps, and in none before. So a member knows of it before any answer of step J - 2, and thus
before the end of its own step J - 1, when it reads the data of step J.

The newcomer gets each slice's values after step J - 1, as if it had pushed that. A server sends
them when all its slices are there, and then the most urgent ones first: so what the first layers
need comes before all that the last ones need. No slice of J is updated before the newcomer has
pushed it, so what it is sent is the same on all servers and does not change under way.

Where workers update, servers have no values: members give them (`elastic.givenmodel`). A server
then only waits for the newcomer's first push, by which it has them.

Some slices *rest*: nobody pushes them, as their parameters are frozen. When any server has closed a
slice of step n, all that are pushed at all are after step n - 2 at least. So nobody is taken in
before some slice of the third step is closed: until then a slice that rests is like any other. If
all other members say goodbye before step J - 1, the newcomer gets the values that they end with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from foreprop.core.collect import AnswerSlice, SliceState
from foreprop.core.membership import Members
from foreprop.core.wire import MOST_ROUNDS
from foreprop.errors import RemoteProtocolError

LEAD_STEPS = 2
"""So many steps before its first one all members know of a newcomer."""
_LAG_STEPS = 2
"""A slice that is pushed in every step is at most so many behind the newest."""
BEGUN_STEPS = 1 + _LAG_STEPS
"""When a slice of this step is closed, those that are at the values of the start rest."""
_MOST_MARGIN_STEPS = 1024
_Step = Annotated[int, msgspec.Meta(ge=-1, lt=2**32)]
"""A server says it, and a frame's header has room for no other (`Kind.JOINED`)."""


# Events.
class JoinAsked(NamedTuple):
    """A rank that is not here wants to be counted from this step on; 0: it only asks."""

    rank: int
    step: int


class JoinSettled(NamedTuple):
    """All servers have promised the step; ``newest``: the last of which any has closed a slice."""

    rank: int
    step: int
    newest: int


# Instructions.
class AnswerJoin(NamedTuple):
    """Say that the step is promised, or 0."""

    rank: int
    step: _Step
    least: _Step
    """The first one that could have been."""
    newest: _Step
    """The last one of which a slice is closed here."""
    ending: bool = False
    """No step can be promised, for some members have said goodbye."""


class MemberJoined(NamedTuple):
    """Tell all members, before anything else, that the rank counts from this step on."""

    rank: int
    step: int


class _EmptyHanded:
    """Of a newcomer that has no values yet."""

    __slots__ = ("behind", "step")

    def __init__(self, step: int, behind: set[int]) -> None:
        self.step = step
        """Its first one."""
        self.behind = behind
        """The slices that are not after the step before, and do not rest."""


class Newcomers:
    """Those of one server. Not thread-safe. ``states`` are by slice.

    ``has_values``: the server has, and gives them.
    """

    def __init__(
        self, members: Members, states: Mapping[int, SliceState], *, has_values: bool = True
    ) -> None:
        self._has_values = has_values
        self.awaiting: dict[int, _EmptyHanded] = {}
        """By rank: those that have joined and have no values yet."""
        self._ending: set[int] = set()
        """Those that were sent what the others end with: they wait for no step, either."""
        self._members = members
        self._states = states

    def ask(self, event: JoinAsked) -> AnswerJoin:
        """Raises `RemoteProtocolError` for a rank that is here."""
        rank, step = event
        if rank in self._members.here and rank not in self._members.promised:
            raise RemoteProtocolError(f"rank {rank} wants to join, and is here")
        self.drop(rank)
        newest = max((_closed(each) for each in self._states.values()), default=0)
        pushed = max((each.last[rank][0] for each in self._states.values()), default=0)
        least = max(newest + LEAD_STEPS, pushed) + 1
        if step < least or self._members.left:
            return AnswerJoin(rank, 0, least, newest, ending=bool(self._members.left))
        self._members.promised[rank] = step
        self._members.here.add(rank)
        self._members.since[rank] = step - LEAD_STEPS
        for each in self._states.values():
            each.last[rank] = (step - 1, MOST_ROUNDS)  # it pushes nothing of a step before
        return AnswerJoin(rank, step, least, newest)

    def settle(self, event: JoinSettled) -> MemberJoined:
        rank, step, newest = event
        if self._members.promised.get(rank) != step:
            raise RemoteProtocolError(f"rank {rank} joins from step {step}, which is not promised")
        del self._members.promised[rank]
        self._members.since[rank] = step
        self._members.ever.add(rank)
        behind = {
            number
            for number, each in self._states.items()
            if each.rounds or each.done_step >= newest - _LAG_STEPS
        }
        self.awaiting[rank] = _EmptyHanded(step, behind)
        return MemberJoined(rank, step)

    def updated(self, slice_: int, step: int) -> list[int]:
        """A slice is; returns those who have had its values too early, for it did not rest."""
        if not self._has_values:
            return []
        coming = self._members.coming_at(step + 1)
        early = [rank for rank in coming if rank not in self.awaiting]
        for awaited in self.awaiting.values():
            if step >= awaited.step - 1:
                awaited.behind.discard(slice_)
            else:
                awaited.behind.add(slice_)
        return early

    def due(self) -> list[AnswerSlice]:
        """What is to be sent to those who can be sent all values now, most urgent first."""
        if not self._has_values:
            return []
        found: list[AnswerSlice] = []
        ends = self._members.here - self._members.left <= self.awaiting.keys() | self._ending
        for rank, awaited in list(self.awaiting.items()):
            opened = any(
                each.rounds and each.oldest[0] < awaited.step for each in self._states.values()
            )
            if opened or not (ends or not awaited.behind):
                continue
            del self.awaiting[rank]
            if awaited.behind:
                self._ending.add(rank)
            found += sorted(
                (
                    AnswerSlice(number, awaited.step - 1, each.priority, (rank,))
                    for number, each in self._states.items()
                ),
                key=lambda answer: (answer.priority, answer.slice),
            )
        return found

    def has_pushed(self, rank: int) -> None:
        """It has all values, whoever has sent them."""
        if not self._has_values:
            self.awaiting.pop(rank, None)

    @property
    def empty_handed(self) -> set[int]:
        """Those without whom alone a session cannot go on: they have no values."""
        return self._members.promised.keys() | self.awaiting.keys()

    def drop(self, rank: int) -> bool:
        """It does not come, or goes again. Returns whether the others know nothing of it."""
        self.awaiting.pop(rank, None)
        self._ending.discard(rank)
        if rank not in self._members.promised:
            return False
        self._members.drop(rank)
        return True


def _closed(each: SliceState) -> int:
    """The last step of which the slice takes no push any more."""
    return max(each.done_step, each.updating)


class JoinBid:
    """A newcomer's side: asks all ``servers`` for a step until all have promised the same one.

    ``begun``: it wants to hear first that a slice of this step is closed, and holds up nobody
    until then.
    """

    def __init__(self, servers: int, *, begun: int = 0) -> None:
        self.step = 0 if begun else 1 + LEAD_STEPS
        """Which they are asked for; 0: how far they are."""
        self.is_early = begun > 0
        """They are not so far: they are to be asked again in a while."""
        self.newest = 0
        """The last step of which any server has closed a slice, as far as is known."""
        self._servers = servers
        self._begun = begun
        self._margin = 1
        self._said: dict[int, AnswerJoin] = {}

    def add(self, server: int, answer: AnswerJoin) -> bool | None:
        """True: the step is settled. False: all are to be asked again, for the new `step`.

        None: others have still to answer. Raises `RemoteProtocolError` for an answer out of turn.
        """
        if server in self._said or answer.step not in (0, self.step):
            raise RemoteProtocolError(f"server {server} promises step {answer.step} out of turn")
        self._said[server] = answer
        if len(self._said) < self._servers:
            return None
        said, self._said = self._said, {}
        least = max(each.least for each in said.values())
        self.newest = max(self.newest, *(each.newest for each in said.values()))
        self.is_early = self.newest < self._begun
        if self.is_early:
            return False
        if all(each.step for each in said.values()):
            return True
        self.step = max(self.step, least) + self._margin
        self._margin = min(2 * self._margin, _MOST_MARGIN_STEPS)
        return False
