"""Which pushes close a round of a slice, and whom it then answers: a server's closing rule.

Theory of operation. `core.server_machine` has the life of a slice: pushes are collected, closed,
held at the barrier if there is one, combined and answered. What differs from session to session is
a rule's. Here is that of every training that says nothing else, `AllMembers`: a round closes when
every worker has pushed it, once, for the same step, and all are answered. Where others go on
without some workers the rule is `core.firstmembers.FirstMembers`, where workers may be in different
steps `core.staleness.BoundedStaleness`.

Rules: steps of a slice increase. A worker that has said goodbye is not waited for: whoever still
needs it makes the session fail with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from foreprop.core.collect import (
    NEVER,
    AnswerSlice,
    Round,
    SliceState,
    UpdateSlice,
    with_gradient,
)
from foreprop.core.frames import FailSession, Peers, PullArrived, PushArrived
from foreprop.core.membership import Members
from foreprop.core.wire import ROUND_SHIFT, Flag
from foreprop.errors import RemoteProtocolError

States = Mapping[int, SliceState]
Handlers = Mapping[type, Callable[[Any], Sequence[Any]]]


class RanksApart(RemoteProtocolError):
    """A push that does not fit the others', because the ranks' loops have done different things."""


class ClosingRule(Protocol):
    """Not thread-safe; `RemoteProtocolError` leaves everything as it was.

    What it returns is done in this order. An `UpdateSlice` is a round that is closed, a
    `MessageReady` a frame to be queued, `PullArrived` one to be answered as soon as it may be.
    """

    members: Members
    handlers: Handlers
    """Events that only this rule knows."""
    may_be_apart: bool
    """Workers may be in different steps: rank 0's values are compared, and not taken."""
    binds: bool
    """The shell is to take the values of an answer at once, for they may change before it leaves:
    `AnswerSlice`."""
    passes_on: bool
    """What is combined goes on to another server (`SERVER`), and so do rank 0's values."""

    def begin(self, state: SliceState) -> None:
        """Another slice is the server's."""

    def add(self, state: SliceState, push: PushArrived) -> Sequence[Any]:
        """Note a push."""

    def updated(self, state: SliceState, update: UpdateSlice, flags: int) -> Sequence[Any]:
        """A closed round is done: who is to be answered, with these flags."""

    def pull(self, state: SliceState, event: PullArrived) -> Sequence[Any]:
        """Somebody asks for values."""

    def leave(self, rank: int) -> Sequence[Any]:
        """A peer has said goodbye."""

    def can_spare(self, rank: int) -> bool:
        """Whether the session can go on without this peer."""

    def incomplete(self) -> list[tuple[int, int]]:
        """Slices that some wait for, because others have not pushed: (slice, step)."""

    def missing(self, state: SliceState, step: int) -> list[int]:
        """Whose pushes of this step are awaited."""

    def describe(self, state: SliceState, step: int) -> str:
        """For whom the slice waits at this step, in words, or nothing."""


def values_of_now(peers: Peers, state: SliceState, event: PullArrived) -> Sequence[AnswerSlice]:
    """Where workers may be apart: for who is owed no answer. Raises `RemoteProtocolError`."""
    rank, slice_, step, priority, _ = event
    if step or rank in state.owed or state.done == NEVER:
        raise RemoteProtocolError(
            f"{peers.name(rank)} pulled slice {slice_} of step {step}; it may ask for the values"
            " of now (step 0), when it is owed no answer"
        )
    return [AnswerSlice(slice_, 0, priority, (rank,))]


def first_failure(states: States, of: Callable[[SliceState], list[FailSession]]) -> Sequence[Any]:
    return next((failure for failure in map(of, states.values()) if failure), [])


def split(peers: Peers, pushed: Mapping[int, int], flag: Flag) -> tuple[str, str] | None:
    """Who has set the flag and who has not, in words; None if all agree."""
    having = sorted(peer for peer, flags in pushed.items() if flags & flag)
    if len(having) in (0, len(pushed)):
        return None
    return peers.listed(having), peers.listed(sorted(pushed.keys() - set(having)))


def unlike_values(
    peers: Peers, state: SliceState, step: int, pushed: Mapping[int, int]
) -> list[FailSession]:
    """Fail if a round's parameter was changed by hand on some ranks only."""
    unlike = split(peers, pushed, Flag.VALUE_CHANGED)
    if unlike is None:
        return []
    reason = (
        f"parameter {state.name} was changed by hand before step {step} on {unlike[0]} but"
        f" not on {unlike[1]}: change it on every rank alike"
    )
    return [FailSession(reason, -1, step)]


def unlike_updates(
    peers: Peers, state: SliceState, step: int, pushed: Mapping[int, int]
) -> list[FailSession]:
    """Fail if some workers update the parameter themselves, and others want it updated."""
    unlike = split(peers, pushed, Flag.GRADIENT)
    if unlike is None:
        return []
    updating, rest = unlike
    reason = (
        f"{updating} update {state.name} themselves in step {step}, but {rest} leave it to the"
        " servers: the loop must use gradients alike on every rank; or set update='workers'"
    )
    return [FailSession(reason, -1, step)]


def lacking(peers: Peers, state: SliceState, peer: int, where: str) -> list[FailSession]:
    """Fail, for this peer is somewhere else and the others need its push of the oldest round."""
    step = state.oldest[0]
    reason = (
        f"{peers.name(peer)} {where}, but {peers.listed(sorted(state.collecting))} are at step"
        f" {step} and need its gradient of {state.name}: all ranks must make the same number of"
        " steps"
    )
    return [FailSession(reason, peer, step - 1)]


class AllMembers:
    """Every peer pushes every round. Of slices, or of shards of rows.

    ``ahead``: a peer may push a step before all have pushed the one before.
    """

    may_be_apart = binds = passes_on = False

    def __init__(self, states: States, peers: Peers, *, ahead: bool = False) -> None:
        self.handlers: Handlers = {}
        self.members = Members(peers.count)
        self._states = states
        self._peers = peers
        self._count = peers.count
        self._everybody = tuple(range(peers.count))
        self._ahead = ahead
        self._left = self.members.left

    def begin(self, state: SliceState) -> None:
        """It has nothing of its own to note."""

    def pull(self, state: SliceState, event: PullArrived) -> Sequence[Any]:
        return [event]

    def add(self, state: SliceState, push: PushArrived) -> Sequence[Any]:
        _, slice_, step, priority, any_flags = push
        pushed = self.note(state, push, any_flags >> ROUND_SHIFT)
        if len(pushed) == 1 or priority < state.priority:
            state.priority = priority
        if len(pushed) < self._count:
            return self.missing_for_ever(state)
        if len(set(pushed.values())) > 1:
            unlike = unlike_values(self._peers, state, step, pushed)
            unlike = unlike or unlike_updates(self._peers, state, step, pushed)
            if unlike:
                return unlike
            ranks = with_gradient(pushed)
        else:
            ranks = () if any_flags & Flag.NO_GRADIENT else self._everybody
        gradient, measure = bool(any_flags & Flag.GRADIENT), bool(any_flags & Flag.MEASURE)
        return [UpdateSlice(slice_, step, ranks, gradient, measure)]

    def note(self, state: SliceState, push: PushArrived, again: int = 0) -> dict[int, int]:
        """Take a push of the step's round ``again``; returns the flags of all that are in."""
        rank, _, step, _, flags = push
        at = (step, again)
        if rank in self._left or not 0 <= rank < self._count:
            self.check_present(rank, state)
        pushed = state.rounds.get(at)
        if pushed is None:
            is_past = at <= state.done or step in (0, state.updating)
            if is_past or (state.rounds and not self._ahead):
                raise self._misplaced(state, rank, at)
            pushed = state.rounds[at] = {}
        elif rank in pushed:
            raise self._misplaced(state, rank, at)
        pushed[rank] = flags
        return pushed

    def updated(self, state: SliceState, update: UpdateSlice, flags: int) -> Sequence[Any]:
        state.done = min(state.rounds)  # of one round: nobody was allowed to be ahead
        state.rounds.clear()
        slice_, step, _, is_average = update[:4]
        return [AnswerSlice(slice_, step, state.priority, self._everybody, flags, is_average)]

    # What does not fit.
    def check_present(self, rank: int, state: SliceState) -> None:
        """Raises `RemoteProtocolError` for somebody unknown, or after the goodbye."""
        self.members.check_rank(rank)
        if rank in self._left:
            raise self._refused(rank, f"{state.use} after its goodbye")

    def _misplaced(self, state: SliceState, rank: int, at: Round) -> RemoteProtocolError:
        """What is wrong with a push that does not fit those that are in."""
        here = at if self._ahead or not state.rounds else state.oldest
        if rank in state.rounds.get(here, {}):
            return self._refused(rank, f"pushed {state.what} twice in step {here[0]}")
        step = at[0]
        if step in (0, state.updating) or at <= state.done:
            past = f"which is past: step {state.done_step} is done"
            return self._refused(rank, f"pushed {state.what} for step {step}, {past}")
        return self._unlike(state, rank, at, here)

    def _unlike(self, state: SliceState, rank: int, at: Round, here: Round) -> RemoteProtocolError:
        """Of a push that is not for the round that the others are in."""
        (step, again), others = at, self._peers.listed(sorted(state.rounds[here]))
        who = self._peers.name(rank)
        if step != here[0]:
            return RanksApart(
                f"{who} pushed {state.what} for step {step} while {others} are at step {here[0]}:"
                " all ranks must make the same number of steps. One that catches an error or skips"
                " a batch must do so on every rank alike"
            )
        return RanksApart(
            f"{who} has averaged the gradient of {state.name} {again} times before in step {step},"
            f" {others} {here[1]} times: run as many backward passes on every rank, and read"
            " gradients between them on every rank alike"
        )

    def _refused(self, rank: int, why: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self._peers.name(rank)} {why}")

    # Who is missing.
    def is_full(self, pushed: Mapping[int, int]) -> bool:
        return len(pushed) == self._count

    def incomplete(self) -> list[tuple[int, int]]:
        return [
            (number, state.oldest[0])
            for number, state in self._states.items()
            if state.rounds and not self.is_full(state.collecting)
        ]

    def missing(self, state: SliceState, step: int) -> list[int]:
        pushed = state.at(step)
        return [peer for peer in self._everybody if peer not in pushed]

    def describe(self, state: SliceState, step: int) -> str:
        missing = self.missing(state, step) if step > state.done_step else ()
        return f"waits for the push of {self._peers.names(missing)}" if missing else ""

    def leave(self, rank: int) -> Sequence[Any]:
        self._left.add(rank)
        return first_failure(self._states, self.missing_for_ever)

    def can_spare(self, rank: int) -> bool:
        return False

    def missing_for_ever(self, state: SliceState) -> list[FailSession]:
        """Fail if somebody will never push what the others have pushed."""
        if not self._left and len(state.rounds) < 2:
            return []
        for peer in self.missing(state, state.oldest[0]) if state.rounds else ():
            ahead = [at for (at, _), pushed in state.rounds.items() if peer in pushed]
            if peer in self._left:
                return lacking(self._peers, state, peer, "has left the session")
            if ahead:
                return lacking(self._peers, state, peer, f"is at step {min(ahead)}")
        return []
