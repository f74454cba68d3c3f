"""A server's closing rule: which pushes close a round of a slice, and whom the server then answers.

Theory of operation. `core.server_machine` leads a slice through its life: pushes are collected,
closed, held at the barrier if there is one, combined and answered. A rule decides what differs
between sessions. The default is `AllMembers`: a round closes when every worker has pushed it, once,
for the same step, and all are answered. Sessions that go on without some workers have
`core.firstmembers.FirstMembers`, and those whose workers may be in different steps
`core.staleness.BoundedStaleness`.

Rules: steps of a slice increase. A worker that has said goodbye is not waited for: if anybody still
needs its push, the session fails with its name.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreprop.core.collect import NEVER, AnswerSlice, SliceState, UpdateSlice, with_gradient
from foreprop.core.frames import FailSession, Peers, PullArrived, PushArrived, Round
from foreprop.core.membership import Members
from foreprop.core.wire import ROUND_SHIFT, Flag
from foreprop.errors import RemoteProtocolError

States = Mapping[int, SliceState]
Handlers = dict[type, Callable[[Any], Sequence[Any]]]


class RanksApart(RemoteProtocolError):
    """A push that does not fit the others', because the ranks' loops have done different things."""


class ClosingRule(abc.ABC):
    """What a server's machine asks about its slices, whose ``states`` the rule keeps.

    Each method returns instructions, which are followed in their order. `UpdateSlice` says that a
    round is closed; `MessageReady` is a frame to queue; `PullArrived` is a pull to answer as soon
    as that may be done. ``handlers`` are for the events that only this rule knows. Not thread-safe;
    `RemoteProtocolError` leaves everything as it was.
    """

    steps_may_differ = False
    """Workers may be in different steps: rank 0's values are compared, and not taken."""
    binds = False
    """The shell must copy an answer's values at once (`AnswerSlice`): they may change before the
    answer leaves."""
    passes_on = False
    """What is combined goes on to another server (`SERVER`), and so do rank 0's values."""

    def __init__(self, states: States, peers: Peers, members: Members | None = None) -> None:
        self.handlers: Handlers = {}
        self.members = Members(peers.count) if members is None else members
        self._states = states
        self._peers = peers
        for state in states.values():
            self.begin(state)

    def begin(self, state: SliceState) -> None:  # noqa: B027 - most have nothing to note
        """Note that the server has another slice."""

    @abc.abstractmethod
    def add(self, state: SliceState, push: PushArrived) -> Sequence[Any]:
        """Note a push; it may close a round."""

    @abc.abstractmethod
    def updated(self, state: SliceState, update: UpdateSlice, flags: int) -> Sequence[Any]:
        """Note that a closed round is combined; returns who is to be answered with ``flags``."""

    def pull(self, state: SliceState, event: PullArrived) -> Sequence[Any]:
        return [event]

    @abc.abstractmethod
    def leave(self, rank: int) -> Sequence[Any]:
        """Note that a peer has said goodbye."""

    def can_spare(self, rank: int) -> bool:
        """Whether the session can go on without this peer."""
        return False

    @abc.abstractmethod
    def incomplete(self) -> list[tuple[int, int]]:
        """The slices, with their steps, that some peers wait for because others have not pushed."""

    @abc.abstractmethod
    def missing(self, state: SliceState, step: int) -> list[int]:
        """The peers whose pushes of this step are awaited."""

    @abc.abstractmethod
    def describe(self, state: SliceState, step: int) -> str:
        """Whom the slice waits for at this step, in words; empty if it waits for nobody."""


def check_owed_nothing(peers: Peers, state: SliceState, event: PullArrived) -> None:
    """Raise `RemoteProtocolError` for a peer that asks for values while it is owed an answer."""
    rank, slice_, step, *_ = event
    if rank in state.owed or state.done == NEVER:
        raise RemoteProtocolError(
            f"{peers.name(rank)} pulled slice {slice_} after step {step}; it may ask for the values"
            " of now, when it is owed no answer"
        )


def first_failure(states: States, of: Callable[[SliceState], list[FailSession]]) -> Sequence[Any]:
    return next((failure for failure in map(of, states.values()) if failure), [])


# How pushes of one round may disagree, which only a difference between the ranks' loops explains.
def split(peers: Peers, pushed: Mapping[int, int], flag: Flag) -> tuple[str, str] | None:
    """The peers that have set the flag and those that have not, in words; None if all agree."""
    having = sorted(peer for peer, flags in pushed.items() if flags & flag)
    if len(having) in (0, len(pushed)):
        return None
    return peers.listed(having), peers.listed(sorted(pushed.keys() - set(having)))


def unlike_values(
    peers: Peers, state: SliceState, step: int, pushed: Mapping[int, int]
) -> list[FailSession]:
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
    unlike = split(peers, pushed, Flag.GRADIENT)
    if unlike is None:
        return []
    updating, rest = unlike
    reason = (
        f"{updating} update {state.name} themselves in step {step}, but {rest} leave it to the"
        " servers: the loop must use gradients alike on every rank; or set update='workers'"
    )
    return [FailSession(reason, -1, step)]


def missing_push(peers: Peers, state: SliceState, peer: int) -> list[FailSession]:
    """The failure of a session whose oldest round needs a push of a peer that has left."""
    step = state.oldest[0]
    reason = (
        f"{peers.name(peer)} has left the session, but {peers.listed(sorted(state.collecting))}"
        f" are at step {step} and need its gradient of {state.name}: all ranks must make the same"
        " number of steps"
    )
    return [FailSession(reason, peer, step - 1)]


class AllMembers(ClosingRule):
    """A round closes when every peer has pushed it, and only then another one begins."""

    def __init__(self, states: States, peers: Peers) -> None:
        super().__init__(states, peers)
        self._count = peers.count
        self._everybody = tuple(range(peers.count))
        self._left = self.members.left

    def add(self, state: SliceState, push: PushArrived) -> Sequence[Any]:
        rank, slice_, step, priority, any_flags = push
        at = (step, any_flags >> ROUND_SHIFT)
        if rank in self._left or not 0 <= rank < self._count:
            self.members.check_rank(rank)
            raise self._refused(rank, f"{state.use} after its goodbye")
        pushed = state.rounds.get(at)
        if pushed is None:
            if state.rounds or at <= state.done or not step:
                raise self._misplaced(state, rank, at)
            pushed = state.rounds[at] = {}
        elif rank in pushed:
            raise self._misplaced(state, rank, at)
        pushed[rank] = any_flags
        if len(pushed) == 1 or priority < state.priority:
            state.priority = priority
        if len(pushed) < self._count:
            return self._stuck(state)
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

    def updated(self, state: SliceState, update: UpdateSlice, flags: int) -> Sequence[Any]:
        state.done = min(state.rounds)  # there is one
        state.rounds.clear()
        slice_, step, _, is_average = update[:4]
        return [AnswerSlice(slice_, step, state.priority, self._everybody, flags, is_average)]

    # Pushes that do not fit.
    def _misplaced(self, state: SliceState, rank: int, at: Round) -> RemoteProtocolError:
        here = state.oldest if state.rounds else at
        if rank in state.collecting:
            return self._refused(rank, f"pushed {state.what} twice in step {here[0]}")
        step, again = at
        if not step or at <= state.done:
            past = f"which is past: step {state.done_step} is done"
            return self._refused(rank, f"pushed {state.what} for step {step}, {past}")
        others = self._peers.listed(sorted(state.rounds[here]))
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

    # Peers that are missing.
    def incomplete(self) -> list[tuple[int, int]]:
        return [
            (number, state.oldest[0])
            for number, state in self._states.items()
            if state.rounds and len(state.collecting) < self._count
        ]

    def missing(self, state: SliceState, step: int) -> list[int]:
        pushed = state.at(step)
        return [peer for peer in self._everybody if peer not in pushed]

    def describe(self, state: SliceState, step: int) -> str:
        missing = self.missing(state, step) if step > state.done_step else ()
        return f"waits for the push of {self._peers.names(missing)}" if missing else ""

    def leave(self, rank: int) -> Sequence[Any]:
        self._left.add(rank)
        return first_failure(self._states, self._stuck)

    def _stuck(self, state: SliceState) -> list[FailSession]:
        """The failure, if a peer has left without the push that the others wait for."""
        if not self._left or not state.rounds:
            return []
        for peer in self.missing(state, state.oldest[0]):
            if peer in self._left:
                return missing_push(self._peers, state, peer)
        return []
