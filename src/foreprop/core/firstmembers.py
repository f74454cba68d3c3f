"""A round closes with the pushes that count: of all members, or of the first N - b.

Theory of operation. `core.membership` says what may be closed. Every slice has one server, which
alone decides what it counts, and all workers get its values: so those who go on have the same bits,
whoever has died when, and nobody has to agree on anything.

With backup workers a push may come *late*, when its slice is closed. Then it is dropped, and
answered with the values of now. If those are newer than its step, the worker holds parameters of
two steps: it says `Flag.LATE` with all its pushes of the next one, and they are dropped, too. So a
gradient that counts in step s is always one of exactly the values after step s - 1. Whoever is in
step s exactly has been answered about s - 1 everywhere in time; where a slice of s is closed, N - b
workers are. So enough of them push every slice of s, and no step waits for ever.

Where workers update, a step may have several rounds of a slice, and each is answered with the
average over those who are counted. Late pushes have no place there: the average of another step is
of no use.

Rules: the rounds of which a worker pushes a slice increase. At most one round of a slice is open.
What a dropped member still sends is dropped; who comes in its place is `core.newcomers`'. Values
come from rank 0: at the start, and without backup workers also later, when they were changed by
hand. With them each worker may ask for the values of now (a pull of step 0), when it is owed no
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreprop.core.closing import (
    Handlers,
    RanksApart,
    States,
    first_failure,
    lacking,
    unlike_updates,
    unlike_values,
    values_of_now,
)
from foreprop.core.collect import (
    NEVER,
    AnswerSlice,
    DropPush,
    Round,
    SliceState,
    UpdateSlice,
    with_gradient,
)
from foreprop.core.frames import FailSession, Finish, Peers, PullArrived, PushArrived
from foreprop.core.membership import CountedReplay, MemberLeft, Members, PeerDropped
from foreprop.core.newcomers import JoinAsked, JoinSettled, Newcomers
from foreprop.core.wire import MOST_ROUNDS, ROUND_SHIFT, Flag
from foreprop.errors import InternalError, RemoteProtocolError


def _named(at: Round) -> str:
    step, again = at
    return f"step {step}" + (f", round {again + 1}" if 0 < again < MOST_ROUNDS else "")


class FirstMembers:
    """See `core.closing.ClosingRule`.

    With a ``replay`` every slice waits for all members, and counts whom that says. ``has_values``:
    the server has what newcomers begin with.
    """

    binds, passes_on = True, False

    def __init__(
        self,
        states: States,
        peers: Peers,
        *,
        members: Members,
        replay: CountedReplay | None = None,
        has_values: bool = True,
    ) -> None:
        self.members = members
        self.may_be_apart = members.backups > 0
        self.newcomers = Newcomers(members, states, has_values=has_values)
        self._states = states
        self._peers = peers
        self._replay = replay
        for state in states.values():
            self.begin(state)
        self.handlers: Handlers = {
            PeerDropped: self._on_peer_dropped,
            JoinAsked: self._on_join_asked,
            JoinSettled: self._on_join_settled,
        }

    def begin(self, state: SliceState) -> None:
        state.last = [(0, 0)] * self.members.workers

    # Read-only views.
    def incomplete(self) -> list[tuple[int, int]]:
        return [
            (number, state.oldest[0])
            for number, state in self._states.items()
            if state.rounds and not state.updating
        ]

    def missing(self, state: SliceState, step: int) -> list[int]:
        return sorted(self.members.of_step(step) - state.at(step).keys())

    def describe(self, state: SliceState, step: int) -> str:
        if step <= state.done_step or step == state.updating:
            return ""
        return f"waits for the push of {self._peers.names(self.missing(state, step))}"

    def can_spare(self, rank: int) -> bool:
        begun = all(state.done != NEVER for state in self._states.values())
        rest = self.members.here - self.newcomers.empty_handed - {rank}
        return (begun or rank != 0) and bool(rest)

    # Values.
    def pull(self, state: SliceState, event: PullArrived) -> Sequence[Any]:
        return values_of_now(self._peers, state, event) if self.may_be_apart else [event]

    # Pushes.
    def add(self, state: SliceState, push: PushArrived) -> Sequence[Any]:
        rank, slice_, step, priority, flags = push
        self.members.check_rank(rank)
        dropped = DropPush(slice_, rank)
        if rank not in self.members.here:
            return [dropped]
        self._check(state, push)
        if self.newcomers.awaiting:
            self.newcomers.has_pushed(rank)
        at = (step, flags >> ROUND_SHIFT)
        state.last[rank] = at
        if at <= state.done:
            return [dropped, AnswerSlice(slice_, step, priority, (rank,))]
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
        what = f"rank {rank} pushed slice {slice_} of {state.name} for {_named(at)}"
        if rank in self.members.left:
            raise RemoteProtocolError(f"{what} after its goodbye")
        if at <= last:
            raise RemoteProtocolError(f"{what} after {_named(last)}")
        if at > state.done and state.rounds and at != state.oldest:
            raise RanksApart(
                f"{what} while {_named(state.oldest)} is open: all ranks must make the same number"
                " of steps, and of backward passes in each"
            )

    def _maybe_unfit(self, push: PushArrived, name: str) -> FailSession | None:
        """Of a push that has no meaning where not all are counted."""
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
        may_close = not missing if self._replay else self.members.may_close(len(on_time), missing)
        if not may_close:
            return self._stuck(state)
        unlike = unlike_values(self._peers, state, step, pushed)
        if unlike := unlike or unlike_updates(self._peers, state, step, pushed):
            return unlike
        counted = self._replay.at(slice_, step) if self._replay else on_time
        flags = {rank: pushed[rank] for rank in counted if rank in pushed}
        dropped = [DropPush(slice_, rank) for rank in pushed if rank not in flags]
        state.updating = step
        is_average = any(each & Flag.GRADIENT for each in flags.values())
        about = (slice_, step, with_gradient(flags), is_average)
        return [*dropped, UpdateSlice(*about, counted=tuple(flags))]

    def _stuck(self, state: SliceState) -> list[FailSession]:
        """Fail if somebody has left who is still needed."""
        if not self.members.left or not state.rounds or state.updating:
            return []
        gone = (r for r in self.missing(state, state.oldest[0]) if r in self.members.left)
        failures = (lacking(self._peers, state, rank, "has left the session") for rank in gone)
        return next(failures, [])

    def updated(self, state: SliceState, update: UpdateSlice, flags: int) -> Sequence[Any]:
        slice_, step = update[:2]
        early = self.newcomers.updated(slice_, step) if self.members.since else ()
        answered = tuple(sorted({*state.owed, *early} & self.members.here))
        state.done, state.updating = state.oldest, 0
        state.rounds.clear()
        state.owed.clear()
        answer = AnswerSlice(slice_, step, state.priority, answered, flags, update.gradient)
        return [answer, *self.newcomers.due()]

    # Who goes.
    def leave(self, rank: int) -> Sequence[Any]:
        if rank not in self.members.here:
            return []
        self.members.left.add(rank)
        return first_failure(self._states, self._stuck) or self.newcomers.due()

    def _on_peer_dropped(self, event: PeerDropped) -> Sequence[Any]:
        """What waits for it waits no longer."""
        rank = event.rank
        if rank not in self.members.here:
            return []
        if not self.can_spare(rank):
            raise InternalError(f"rank {rank} was dropped, and cannot be spared")
        followed: list[Any] = []
        if not self.newcomers.drop(rank):
            followed.append(self._told_of(rank))
        self.members.drop(rank)
        followed += self._close_all_complete()
        return [*followed, Finish()] if self.members.all_left else followed

    def _told_of(self, rank: int) -> MemberLeft:
        last = [state.last[rank][0] for state in self._states.values()]
        step, first = max(last, default=0), self.members.since.get(rank, 1)
        counted = last.count(step) if step >= first else 0
        return MemberLeft(rank, step, counted, len(last))

    def _close_all_complete(self) -> list[Any]:
        """Some wait for fewer members now, or newcomers for fewer slices."""
        followed: list[Any] = []
        for number, _ in self.incomplete():
            followed += self._close_if_complete(number, self._states[number])
        return [*followed, *self.newcomers.due()]

    # Who comes.
    def _on_join_asked(self, event: JoinAsked) -> Sequence[Any]:
        self.members.check_rank(event.rank)
        answer = self.newcomers.ask(event)
        return [answer, *self._close_all_complete()]  # an earlier promise is forgotten

    def _on_join_settled(self, event: JoinSettled) -> Sequence[Any]:
        return [self.newcomers.settle(event), *self._close_all_complete()]
