"""The closing rule of sessions whose members change, and of those with backup workers.

Theory of operation. A round closes with the pushes of all members, or of the first N - b with b
backup workers (`core.membership`). Every slice has one server, which alone decides whose pushes it
counts, and all workers get its values. So those who go on have the same bits, whoever has died
when, and need not agree on anything.

With backup workers a push may come *late*, when its slice is closed. Then it is dropped, and
answered with the present values and `Flag.DROPPED`. If these are newer than the push's step, the
worker holds parameters of two steps: it sets `Flag.LATE` on all its pushes of the next step, and
these are dropped, too. So a gradient that counts in step s is always one of exactly the values
after step s - 1. A worker that is in step s exactly has been answered about s - 1 in time for every
slice, and where a slice of s is closed, N - b workers are. So enough of them push every slice of s,
and no step waits for ever.

Where workers update, a step may have several rounds of a slice, and each is answered with the
average over those that are counted. Late pushes have no place there: the average of another step is
of no use. A member that is lost may have been ahead: its own server, lost with it, may have
answered it alone, and the others make that round again without it (`core.takeover`). What it has
pushed since is of values that nobody has. So in an open round it counts only beside a member that
stays, whose push shows that it has had all of the round before.

N is the number of the step's members: fewer when some are lost, and at least one push counts. But
if all who held exactly the values after s - 1 are lost within s, a slice that none of them has
pushed counts nobody: it stays as it is in that step, and the others are exact again in the next.

With backup workers members *meet* to have the same values: each pulls the present ones when it is
owed no answer, and says how many steps it has made. All are answered when all have pulled, for then
no push is under way. A member that is lost, or joins at a later step, is not waited for.

Rules: the rounds of which a worker pushes a slice increase. At most one round of a slice is open.
What a dropped member still sends is dropped; `core.newcomers` has those that join. Values come from
rank 0: at the start, and without backup workers also later, when they were changed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreprop.core.closing import (
    ClosingRule,
    RanksApart,
    States,
    check_owed_nothing,
    first_failure,
    missing_push,
    unlike_updates,
    unlike_values,
)
from foreprop.core.collect import (
    NEVER,
    AnswerSlice,
    DropPush,
    SliceState,
    UpdateSlice,
    with_gradient,
)
from foreprop.core.frames import FailSession, Finish, Peers, PullArrived, PushArrived, Round
from foreprop.core.membership import CountedReplay, MemberLeft, Members, PeerDropped
from foreprop.core.newcomers import JoinAsked, JoinSettled, Newcomers
from foreprop.core.wire import MOST_ROUNDS, ROUND_SHIFT, Flag
from foreprop.errors import InternalError, RemoteProtocolError

_MEETING = 0  # stands for a step where all are to meet


def _name_of(at: Round) -> str:
    step, again = at
    return f"step {step}" + (f", round {again + 1}" if 0 < again < MOST_ROUNDS else "")


class FirstMembers(ClosingRule):
    """A round closes with the first pushes of its members, as many as `Members` says.

    With a ``replay`` every slice waits for all members, and counts those that the replay names.
    With ``has_values`` the server has the values that newcomers begin with.
    """

    binds = True

    def __init__(
        self,
        states: States,
        peers: Peers,
        *,
        members: Members,
        replay: CountedReplay | None = None,
        has_values: bool = True,
    ) -> None:
        super().__init__(states, peers, members)
        self.steps_may_differ = members.backups > 0
        self._has_values = has_values
        self.newcomers = Newcomers(members, states, has_values=has_values)
        self._replay = replay
        self._asked: dict[int, dict[int, tuple[int, int]]] = {}
        """The members that have come to meet, by slice: steps made, and priority."""
        self.handlers |= {
            PeerDropped: self._on_peer_dropped,
            JoinAsked: self._on_join_asked,
            JoinSettled: self._on_join_settled,
        }

    def begin(self, state: SliceState) -> None:
        state.last = [(0, 0)] * self.members.workers

    # Read-only views.
    def incomplete(self) -> list[tuple[int, int]]:
        collecting = [
            (number, state.oldest[0])
            for number, state in self._states.items()
            if state.owed.keys() & self.members.here and not state.updating
        ]
        return [*collecting, *((number, _MEETING) for number in self._asked)]

    def missing(self, state: SliceState, step: int) -> list[int]:
        if step == _MEETING:
            asked = self._asked.get(state.number, {})
            made = max((asked[rank][0] for rank in asked.keys() & self.members.here), default=0)
            return sorted(self.members.of_step(made) - self.members.left - asked.keys())
        return sorted(self.members.of_step(step) - state.at(step).keys())

    def describe(self, state: SliceState, step: int) -> str:
        if step == _MEETING and self._asked.get(state.number):
            missing = self._peers.names(self.missing(state, step))
            return f"is to be read by all together, and waits for {missing}"
        if step <= state.done_step or step == state.updating:
            return ""
        return f"waits for the push of {self._peers.names(self.missing(state, step))}"

    def can_spare(self, rank: int) -> bool:
        have_values = all(state.done != NEVER for state in self._states.values())
        rest = self.members.here - self.newcomers.empty_handed - {rank}
        return (have_values or rank != 0) and bool(rest)

    # Values.
    def pull(self, state: SliceState, event: PullArrived) -> Sequence[Any]:
        if not self.steps_may_differ:
            return [event]
        rank, slice_, made, priority, _ = event
        if rank not in self.members.here:
            return []
        check_owed_nothing(self._peers, state, event)
        self._asked.setdefault(slice_, {})[rank] = (made, priority)
        return self._meet(state)

    def _meet(self, state: SliceState) -> Sequence[Any]:
        asked = self._asked.get(state.number)
        if not asked or self.missing(state, _MEETING):
            return []
        del self._asked[state.number]
        priority = min(priority for _, priority in asked.values())
        here = tuple(sorted(asked.keys() & self.members.here))
        return [AnswerSlice(state.number, 0, priority, here)] if here else []

    # Pushes.
    def add(self, state: SliceState, push: PushArrived) -> Sequence[Any]:
        rank, slice_, step, priority, flags = push
        self.members.check_rank(rank)
        dropped = DropPush(slice_, rank, step)
        if rank not in self.members.here:
            return [dropped]
        self._check(state, push)
        if self.newcomers.awaiting:
            self.newcomers.has_pushed(rank)
        at = (step, flags >> ROUND_SHIFT)
        state.last[rank] = at
        if at <= state.done:  # an average may have counted it, at a server that is lost
            answer_flags = 0 if flags & Flag.GRADIENT else int(Flag.DROPPED)
            return [dropped, AnswerSlice(slice_, step, priority, (rank,), answer_flags)]
        state.owed[rank] = (step, priority)
        if state.updating:
            return [dropped]
        if unfit := self._maybe_unfit(push, state.name):
            return [unfit]
        state.priority = min(priority, state.priority) if state.rounds else priority
        state.rounds.setdefault(at, {})[rank] = flags
        return self._close_if_complete(slice_, state)

    def _check(self, state: SliceState, push: PushArrived) -> None:
        rank, slice_, step, _, flags = push
        at, last = (step, flags >> ROUND_SHIFT), state.last[rank]
        what = f"rank {rank} pushed slice {slice_} of {state.name} for {_name_of(at)}"
        if rank in self.members.left:
            raise RemoteProtocolError(f"{what} after its goodbye")
        if at <= last:
            raise RemoteProtocolError(f"{what} after {_name_of(last)}")
        if at > state.done and state.rounds and at != state.oldest:
            raise RanksApart(
                f"{what} while {_name_of(state.oldest)} is open: all ranks must make the same"
                " number of steps, and of backward passes in each"
            )

    def _maybe_unfit(self, push: PushArrived, name: str) -> FailSession | None:
        """The failure for a push that has no meaning where not all pushes are counted."""
        rank, _, step, _, flags = push
        if flags & Flag.GRADIENT and self.members.backups:
            why = "the average gradient is asked for by rank {}: leave it to the servers"
        elif flags & Flag.VALUE_CHANGED and self.members.backups:
            why = "it was changed by hand on rank {}: change parameters before parallelize()"
        elif flags & Flag.VALUE_CHANGED and 0 not in self.members.here:
            why = "it was changed by hand on rank {}, and rank 0, whose values count, has left"
        else:
            return None
        return FailSession(f"{name}, step {step}: {why.format(rank)}", -1, step)

    def _close_if_complete(self, slice_: int, state: SliceState) -> Sequence[Any]:
        (step, _), pushed = state.oldest, state.collecting
        on_time = tuple(rank for rank in sorted(pushed) if not pushed[rank] & Flag.LATE)
        missing = self.missing(state, step)
        may_close = self.members.may_close(step, len(on_time), missing)
        if not may_close or (self._replay and missing):
            return self._stuck(state)
        unlike = unlike_values(self._peers, state, step, pushed)
        if unlike := unlike or unlike_updates(self._peers, state, step, pushed):
            return unlike
        counted = self._replay.at(slice_, step) if self._replay else on_time
        flags = {rank: pushed[rank] for rank in counted if rank in pushed}
        dropped = [DropPush(slice_, rank, step) for rank in pushed if rank not in flags]
        state.updating = step
        is_average = any(each & Flag.GRADIENT for each in flags.values())
        about = (slice_, step, with_gradient(flags), is_average)
        return [*dropped, UpdateSlice(*about, counted=tuple(flags))]

    def _stuck(self, state: SliceState) -> list[FailSession]:
        """The failure, if a member has left whose push is still needed."""
        if not self.members.left or not state.rounds or state.updating:
            return []
        for rank in self.missing(state, state.oldest[0]):
            if rank in self.members.left:
                return missing_push(self._peers, state, rank)
        return []

    def updated(self, state: SliceState, update: UpdateSlice, flags: int) -> Sequence[Any]:
        slice_, step = update[:2]
        early = self.newcomers.updated(slice_, step) if self.members.since else ()
        here = self.members.here
        dropped = tuple(sorted((state.owed.keys() & here).difference(update.counted or ())))
        answered = tuple(sorted(({*state.owed, *early} & here).difference(dropped)))
        state.done, state.updating = state.oldest, 0
        state.rounds.clear()
        state.owed.clear()
        answers = [
            AnswerSlice(slice_, step, state.priority, ranks, flags | more, update.gradient)
            for ranks, more in ((answered, 0), (dropped, int(Flag.DROPPED)))
            if ranks
        ]
        return [*answers, *self.newcomers.due()]

    # Members that go.
    def leave(self, rank: int) -> Sequence[Any]:
        if rank not in self.members.here:
            return []
        self.members.left.add(rank)
        failure = first_failure(self._states, self._stuck)
        return failure or [*self._meet_all(), *self.newcomers.due()]

    def _on_peer_dropped(self, event: PeerDropped) -> Sequence[Any]:
        rank = event.rank
        if rank not in self.members.here:
            return []
        if not self.can_spare(rank):
            raise InternalError(f"rank {rank} was dropped, and cannot be spared")
        followed: list[Any] = []
        left = None if self.newcomers.drop(rank) else self._member_left(rank)
        self.members.drop(rank)
        for state in self._states.values():  # another worker may come with its number
            state.owed.pop(rank, None)
        dropped = self._drop_pushed_ahead()
        if left is not None:
            ahead = sum((each.rank, each.step) == (rank, left.step) for each in dropped)
            followed.append(left._replace(counted=left.counted - ahead))
        followed += [*dropped, *self._close_all_complete()]
        return [*followed, Finish()] if self.members.all_left else followed

    def _drop_pushed_ahead(self) -> list[DropPush]:
        """Forget open rounds that no member has pushed."""
        dropped: list[DropPush] = []
        if self._has_values:
            return dropped
        for number, state in self._states.items():
            if state.updating or state.collecting.keys() & self.members.here:
                continue
            step, _ = state.oldest
            dropped += [DropPush(number, rank, step) for rank in state.collecting]
            state.rounds.clear()
        return dropped

    def _member_left(self, rank: int) -> MemberLeft:
        last = [state.last[rank][0] for state in self._states.values()]
        step, first = max(last, default=0), self.members.since.get(rank, 1)
        if self.members.backups:  # the others may be ahead of it
            closed = (max(each.done_step, each.updating) for each in self._states.values())
            step = max(step, max(closed, default=0))
        counted = last.count(step) if step >= first else 0
        return MemberLeft(rank, step, counted, len(last))

    def _close_all_complete(self) -> list[Any]:
        # slices wait for fewer members now, and newcomers for fewer slices
        followed: list[Any] = []
        for number, step in self.incomplete():
            if step != _MEETING:
                followed += self._close_if_complete(number, self._states[number])
        return [*followed, *self._meet_all(), *self.newcomers.due()]

    def _meet_all(self) -> list[Any]:
        return [each for number in list(self._asked) for each in self._meet(self._states[number])]

    # Members that join.
    def _on_join_asked(self, event: JoinAsked) -> Sequence[Any]:
        self.members.check_rank(event.rank)
        answer = self.newcomers.ask(event)
        return [answer, *self._close_all_complete()]  # an earlier promise is forgotten

    def _on_join_settled(self, event: JoinSettled) -> Sequence[Any]:
        return [self.newcomers.settle(event), *self._close_all_complete()]
