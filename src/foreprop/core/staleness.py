"""Workers may run ahead of each other by some steps: SSP and ASGD as a server's closing rule.

Theory of operation. A worker's push of step c is answered with the slice's values when two things
hold: its own update is in them, and so are all workers' updates up to step c - s. A worker uses
a slice in step c + 1 when it has the answer of step c. So s bounds how stale a read may be: in step
c a worker sees all updates up to step c - s - 1, and its own (read-my-writes). It never goes on
while it is more than s steps ahead of the slowest.

- s = 0 is BSP: all pushes of a step are one update, which is `core.closing.AllMembers`.
- s > 0 is SSP (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter
  Server, NIPS 2013, section 2): each push is an update by itself. Updates are made in the order in
  which pushes come, those most behind first, so that the others wait less.
- "async" is ASGD: there is no bound, and a worker waits for its own update only (P3 appendix B.2).

An update by itself is one worker's share of the mean: the gradient is divided by the number of all
workers, so that as many steps move the parameters as far as with BSP.

Rules: the steps of which a worker pushes a slice increase, and it has been answered about one when
it pushes the next. Values come from rank 0 at the start only; later, each worker may ask for the
present ones (a pull of step 0), when it is owed no answer. The workers' machine
(`core.worker_machine`) is that of BSP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, Self, TypeVar

from foreprop.core.closing import AllMembers, ClosingRule, States, check_owed_nothing, first_failure
from foreprop.core.collect import AnswerSlice, SliceState, UpdateSlice
from foreprop.core.frames import FailSession, Peers, PullArrived, PushArrived
from foreprop.core.wire import Flag
from foreprop.errors import ConfigError, InternalError, RemoteProtocolError

Staleness = int | Literal["async"]
ASYNC: Staleness = "async"


def most_steps_apart(staleness: Staleness) -> float:
    """How many steps workers may be apart; raises `ConfigError`."""
    if staleness == ASYNC:
        return math.inf
    if not isinstance(staleness, int) or staleness < 0:
        raise ConfigError(
            f"staleness is {staleness!r}; it must be a number of steps from 0, or {ASYNC!r}"
        )
    return staleness


class BoundedStaleness(ClosingRule):
    """Each push closes a round by itself; ``staleness`` is s, or "async".

    An answer has the values of the moment at which its frame is sent: between two updates, never
    within one.
    """

    steps_may_differ = True

    def __init__(self, states: States, peers: Peers, *, staleness: Staleness) -> None:
        super().__init__(states, peers)
        self._bound = most_steps_apart(staleness)
        if not self._bound:
            raise InternalError("workers that are never apart have another rule (`AllMembers`)")
        self._applied = {slice_: [0] * peers.count for slice_ in states}
        """The last step of each rank that is in the values, by slice."""
        self._versions = dict.fromkeys(states, 0)
        self._seen = {slice_: [0] * peers.count for slice_ in states}
        """The version in each rank's last answer, by slice."""

    def begin(self, state: SliceState) -> None:
        state.last = [(0, 0)] * self._peers.count

    # Read-only views.
    def waiting(self, slice_: int) -> tuple[int, ...]:
        """The ranks whose updates are in the values, and that still wait for slower ones."""
        owed, applied = self._states[slice_].owed, self._applied[slice_]
        return tuple(rank for rank in sorted(owed) if owed[rank][0] == applied[rank])

    def incomplete(self) -> list[tuple[int, int]]:
        held = {slice_: self.waiting(slice_) for slice_ in self._states}
        return [(n, max(self._applied[n][rank] for rank in held[n])) for n in held if held[n]]

    def missing(self, state: SliceState, step: int) -> list[int]:
        return [rank for rank, (last, _) in enumerate(state.last) if step - last > self._bound]

    def describe(self, state: SliceState, step: int) -> str:
        applied = self._applied[state.number]
        slowest = min(applied)
        if self.waiting(state.number) and step - slowest > self._bound:
            return (
                f"waits for rank {applied.index(slowest)}, which is at step {slowest}: step {step}"
                f" may be {self._bound:g} ahead"
            )
        return "has not been pushed" if step > max(state.last)[0] else ""

    # The life of a slice.
    def pull(self, state: SliceState, event: PullArrived) -> Sequence[Any]:
        if event.step:
            raise RemoteProtocolError(
                f"{self._peers.name(event.rank)} pulled slice {event.slice} of step {event.step};"
                " it may ask for the values of now (step 0)"
            )
        check_owed_nothing(self._peers, state, event)
        return [AnswerSlice(event.slice, 0, event.priority, (event.rank,))]

    def add(self, state: SliceState, push: PushArrived) -> Sequence[Any]:
        rank, slice_, step, priority, flags = push
        self._check(state, push)
        state.last[rank], state.owed[rank] = (step, 0), (step, priority)
        state.priority = priority
        if unfit := _maybe_unfit(push, state.name):
            return [unfit]
        ranks = () if flags & Flag.NO_GRADIENT else (rank,)
        return [*self._stuck(state), UpdateSlice(slice_, step, ranks, counted=(rank,))]

    def _check(self, state: SliceState, push: PushArrived) -> None:
        rank, _, step = push[:3]
        self.members.check_rank(rank)
        what = f"rank {rank} pushed {state.what} for step {step}"
        last = state.last[rank][0]
        if rank in self.members.left:
            raise RemoteProtocolError(f"{what} after its goodbye")
        if step <= last:
            raise RemoteProtocolError(f"{what} after step {last}")
        if rank in state.owed:
            raise RemoteProtocolError(f"{what} before it was answered about step {last}")

    def updated(self, state: SliceState, update: UpdateSlice, flags: int) -> Sequence[Any]:
        slice_, step, ranks = update[:3]
        self._versions[slice_] += bool(ranks)
        for rank in update.counted or ():
            self._applied[slice_][rank] = step
        state.done = max(state.done, (step, 0))
        # answer all that no longer have to wait for slower ones
        answers = []
        slowest, version = min(self._applied[slice_]), self._versions[slice_]
        for rank in self.waiting(slice_):
            step, priority = state.owed[rank]
            if step - slowest > self._bound:
                continue
            del state.owed[rank]
            unchanged = Flag.UNCHANGED if self._seen[slice_][rank] == version else 0
            self._seen[slice_][rank] = version
            answers.append(AnswerSlice(slice_, step, priority, (rank,), int(unchanged)))
        return answers

    # Workers that go.
    def leave(self, rank: int) -> Sequence[Any]:
        self.members.left.add(rank)
        return first_failure(self._states, self._stuck)

    def _stuck(self, state: SliceState) -> list[FailSession]:
        """The failure, if a worker will wait for one that has left."""
        steps = [step for step, _ in state.last]
        ahead = max(steps)
        for rank in sorted(self.members.left):
            last = steps[rank]
            if ahead - last <= self._bound:
                continue
            reason = (
                f"rank {rank} has left the session after step {last}, but rank"
                f" {steps.index(ahead)} is at step {ahead}, and may be {self._bound:g}"
                f" steps ahead with {state.name}: all ranks must make the same number of steps"
            )
            return [FailSession(reason, rank, last)]
        return []


def rule_of(staleness: Staleness) -> Callable[[States, Peers], ClosingRule]:
    """The closing rule where workers may be so many steps apart."""
    if not most_steps_apart(staleness):
        return AllMembers
    return partial(BoundedStaleness, staleness=staleness)


def _maybe_unfit(push: PushArrived, name: str) -> FailSession | None:
    """The failure for a push that has no meaning where each is an update by itself."""
    rank, _, step, _, flags = push
    who = f"rank {rank} (step {step}), but with staleness"
    if flags & Flag.GRADIENT:
        return FailSession(
            f"the average gradient of {name} is asked for by {who} there is none: each rank's is an"
            " update by itself; use gradients in hooks (Tensor.register_hook), or leave staleness"
            " out",
            -1,
            step,
        )
    if flags & Flag.VALUE_CHANGED:
        return FailSession(
            f"{name} was changed by hand by {who} the ranks are in different steps: change"
            " parameters before parallelize(), or close the session first and begin another",
            -1,
            step,
        )
    return None


class Elementwise(Protocol):
    """A number, or an array of them."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...


Values = TypeVar("Values", bound=Elementwise)


def compensate(gradient: Values, now: Values, then: Values, *, strength: float) -> Values:
    """The gradient as it would be at the values ``now``, if it was computed at those of ``then``.

    This is g + lambda g g (w - w_bak), elementwise, with lambda = ``strength`` from 0: DC-ASGD
    (Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017,
    section 4). ``then`` is the worker's last answer. 0 gives the gradient itself, to the bit.
    """
    if not 0 <= strength < math.inf:
        raise ConfigError(f"strength is {strength!r}; it must be finite and at least 0")
    if not strength:
        return gradient
    return gradient + gradient * gradient * (now - then) * strength
