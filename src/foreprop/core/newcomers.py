"""A worker that joins while others train: from which step it counts, and when it gets values.

Theory of operation. A newcomer *asks* every server to count it from a step J on. A server that has
closed a slice of step J - 2 or of a later one refuses, and says which step it could promise. One
that *promises* J closes no slice of step J - 2 until it hears more. If one server refuses, the
newcomer asks all again with a later J, and that takes the place of earlier promises. If all have
promised, J is *settled*: each server tells all members, and counts the newcomer in every slice of J
and of later steps, and in none before. So a member knows of it before any answer of step J - 2, and
thus before the end of its own step J - 1, when it reads the data of step J.

The newcomer gets each slice's values after step J - 1, as if it had pushed that. A server sends
them when all its slices have them, the most urgent first: so what the first layers need comes
before all that the last ones need. No slice of J is updated before the newcomer has pushed it, so
what it is sent is the same on all servers and does not change under way.

Where workers update, servers have no values: members give them (`members.statetransfer`). A server
then only waits for the newcomer's first push, which shows that it has them.

Some slices *rest*: nobody pushes them, as their parameters are frozen. When any server has closed a
slice of step n, all slices that are pushed at all are after step n - 2 at least. So nobody is taken
in before some slice of the third step is closed: until then a resting slice is like any other. If
all other members say goodbye before step J - 1, the newcomer gets the values that they end with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from foreprop.core.collect import AnswerSlice, SliceState
from foreprop.core.membership import Members
from foreprop.core.wire import MOST_ROUNDS
from foreprop.errors import RemoteProtocolError

LEAD_STEPS = 2
"""How many steps before a newcomer's first one all members know of it."""
_LAG_STEPS = 2  # how far a slice that is pushed in every step may be behind the newest
BEGUN_STEPS = 1 + _LAG_STEPS
"""When a slice of this step is closed, slices that still have the values of the start rest."""
_MOST_MARGIN_STEPS = 1024
_Step = Annotated[int, msgspec.Meta(ge=-1, lt=2**32)]  # what a frame's header has room for


# Events.
class JoinAsked(NamedTuple):
    """A rank that is not here wants to be counted from this step on; 0: it only asks."""

    rank: int
    step: int


class JoinSettled(NamedTuple):
    """All servers have promised the step; ``newest`` is the last that any closed a slice of."""

    rank: int
    step: int
    newest: int


# Instructions.
class AnswerJoin(NamedTuple):
    """Say that ``step`` is promised; or 0, and then ``least`` could have been.

    ``newest`` is the last step that a slice is closed of here. With ``ending`` no step can be
    promised, for some members have said goodbye.
    """

    rank: int
    step: _Step
    least: _Step
    newest: _Step
    ending: bool = False


class MemberJoined(NamedTuple):
    """Tell all members, before anything else, that the rank counts from this step on."""

    rank: int
    step: int


@dataclass(slots=True, eq=False)
class _EmptyHanded:
    """A newcomer that has no values yet; ``step`` is its first one."""

    step: int
    behind: set[int]
    """The slices that do not have the values after the step before, and do not rest."""


class Newcomers:
    """One server's newcomers, to whom it gives values if it ``has_values``. Not thread-safe."""

    def __init__(
        self, members: Members, states: Mapping[int, SliceState], *, has_values: bool = True
    ) -> None:
        self._has_values = has_values
        self.awaiting: dict[int, _EmptyHanded] = {}
        """The newcomers that are settled and have no values yet, by rank."""
        self._ending: set[int] = set()
        """The newcomers that were sent the values that all end with: they wait for no step."""
        self._members = members
        self._states = states

    def ask(self, event: JoinAsked) -> AnswerJoin:
        """Promise the step if possible; raises `RemoteProtocolError` for a rank that is here."""
        rank, step = event
        self.begin_anew(rank)
        closed = (max(each.done_step, each.updating) for each in self._states.values())
        newest = max(closed, default=0)  # the last step of which some slice takes no push any more
        pushed = max((each.last[rank][0] for each in self._states.values()), default=0)
        least = max(newest + LEAD_STEPS, pushed) + 1
        if step < least or self._members.left:
            return AnswerJoin(rank, 0, least, newest, ending=bool(self._members.left))
        self.promise(rank, step)
        for each in self._states.values():
            each.last[rank] = (step - 1, MOST_ROUNDS)  # it pushes nothing of a step before
        return AnswerJoin(rank, step, least, newest)

    def begin_anew(self, rank: int) -> None:
        """Forget what the rank was promised; raises `RemoteProtocolError` if it is a member."""
        if rank in self._members.here and rank not in self._members.promised:
            raise RemoteProtocolError(f"rank {rank} wants to join, and is here")
        self.drop(rank)

    def promise(self, rank: int, step: int) -> None:
        self._members.promised[rank] = step
        self._members.here.add(rank)
        self._members.since[rank] = step - LEAD_STEPS

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
        """Note an update; returns newcomers that were sent the slice's values too early.

        They were sent them as those of a slice that rests.
        """
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
        """The values of newcomers that can be sent all now, the most urgent first."""
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
        if not self._has_values:  # it has them from members
            self.awaiting.pop(rank, None)

    @property
    def empty_handed(self) -> set[int]:
        """The newcomers without values, who cannot go on alone."""
        return self._members.promised.keys() | self.awaiting.keys()

    def drop(self, rank: int) -> bool:
        """Forget a newcomer that is lost; returns whether the members know nothing of it."""
        self.awaiting.pop(rank, None)
        self._ending.discard(rank)
        if rank not in self._members.promised:
            return False
        self._members.drop(rank)
        return True


class JoinBid:
    """A newcomer's side: asks all ``servers`` for a step until all have promised the same one.

    With ``begun`` it only asks how far they are until a slice of this step is closed, and so holds
    up nobody until then.
    """

    def __init__(self, servers: int, *, begun: int = 0) -> None:
        self.step = 0 if begun else 1 + LEAD_STEPS
        """The step that servers are asked for; 0: how far they are."""
        self.is_early = begun > 0  # no server is so far: ask again in a while
        self.newest = 0  # the last step that any server has closed a slice of, as far as is known
        self._servers = servers
        self._begun = begun
        self._margin = 1
        self._said: dict[int, AnswerJoin] = {}

    def add(self, server: int, answer: AnswerJoin) -> bool | None:
        """Note an answer: True if the step is settled, False to ask all again for the new `step`.

        None if other servers have still to answer. Raises `RemoteProtocolError` for an answer out
        of turn.
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
