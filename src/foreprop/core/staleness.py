"""How far workers may run ahead of each other: BSP, SSP and ASGD as one server.

Theory of operation. A worker's push of step c is answered with the slice's values when two things
hold: its own update is in them, and so are all workers' updates up to step c - s. A worker uses
a slice in step c + 1 when it has the answer of step c. So s bounds how stale a read may be: in step
c a worker sees all updates up to step c - s - 1, and its own (read-my-writes). It never goes on
while it is more than s steps ahead of the slowest.

- s = 0 is BSP: pushes are gathered and summed in rank order, in one update, as
  `core.server_machine` does it, and so with the same bits.
- s > 0 is SSP (Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter
  Server, NIPS 2013, section 2): each push is an update by itself, in the order in which they come.
- "async" is ASGD: there is no bound, and a worker waits for its own update only (P3 appendix B.2).

An update by itself is one worker's share of the mean. Whoever applies it divides the gradient by
all workers, so that as many steps move the parameters as far as with BSP.

Rules: the steps of which a worker pushes a slice increase, and it has been answered about one when
it pushes the next. With s = 0 each pushes every slice in every step. Values come from rank 0 at the
start only; later, each worker may ask for those of the moment (a pull of step 0), when it is owed
no answer. The workers' machine (`core.worker_machine`) is that of BSP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    NO_TOKEN,
    FailSession,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    PeerLeft,
    PullArrived,
    PushArrived,
    SendFrame,
    ValueArrived,
)
from foreprop.core.sendqueue import USUAL_TURNS, Order, SendLanes, SendQueue, Turns
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Kind
from foreprop.errors import ConfigError, InternalError, RemoteProtocolError

Staleness = int | Literal["async"]
ASYNC: Staleness = "async"

StaleInstruction = SendFrame | UpdateSlice | InstallValue | FailSession | Finish


def parse_staleness(name: str, text: str) -> Staleness:
    """Of ``0``, ``4`` or ``async``; raises `ConfigError` that begins with ``name``."""
    if text.strip() == ASYNC:
        return ASYNC
    if not text.strip().isdecimal():
        raise ConfigError(
            f"{name} is {text!r}; it must be a number of steps from 0, or {ASYNC!r} for no bound"
        )
    return int(text)


def most_steps_apart(staleness: Staleness) -> float:
    """s as a number; raises `ConfigError`."""
    if staleness == ASYNC:
        return math.inf
    if not isinstance(staleness, int) or staleness < 0:
        raise ConfigError(
            f"staleness is {staleness!r}; it must be a number of steps from 0, or {ASYNC!r}"
        )
    return staleness


class _Due(NamedTuple):
    """An update that is queued or under way."""

    update: UpdateSlice
    pushers: tuple[int, ...]
    """Who is to be answered about it: also those without a gradient."""
    priority: int


class _Clocks:
    """Of one slice, by rank: the last steps that were pushed, are in the values, and answered."""

    __slots__ = (
        "answered",
        "applied",
        "gathered",
        "has_values",
        "held",
        "name",
        "pushed",
        "seen",
        "version",
    )

    def __init__(self, name: str, workers: int) -> None:
        self.name = name
        self.pushed = [0] * workers
        self.applied = [0] * workers
        self.answered = [0] * workers
        self.seen = [0] * workers
        """The version that the last answer had."""
        self.version = 0
        self.has_values = False
        """Rank 0 has sent those to begin from."""
        self.held: dict[int, tuple[int, int]] = {}
        """Step and priority of pushes that are applied and not answered, by rank."""
        self.gathered: dict[int, tuple[int, bool]] = {}
        """Priority, and whether there is a gradient, of a step's pushes; with s = 0."""


class StaleServer:
    """Decides what a server updates and answers next, if workers may be apart. Not thread-safe.

    ``staleness``: s, or "async". ``workers`` push to it, by rank; ``names`` are the parameters',
    for messages; ``turns`` are the workers'. An answer has the values of the moment at which its
    `SendFrame` is returned, or later ones: between two updates, never within one.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        index: int,
        workers: int,
        staleness: Staleness,
        order: Order,
        names: Sequence[str],
        turns: Turns = USUAL_TURNS,
    ) -> None:
        self._apart = most_steps_apart(staleness)
        self._workers = workers
        self._slices = {piece.number: piece for piece in slices if piece.server == index}
        self._clocks = {
            number: _Clocks(names[piece.parameter], workers)
            for number, piece in self._slices.items()
        }
        self._index = index
        self._updates: SendQueue[_Due] = SendQueue(order)
        self._updating: _Due | None = None
        self._lanes: SendLanes[SendFrame] = SendLanes(order, turns=turns)
        self._left: set[int] = set()
        self._handlers: dict[type, Callable[[Any], Sequence[StaleInstruction]]] = {
            PushArrived: self._on_push_arrived,
            ValueArrived: self._on_value_arrived,
            PullArrived: self._on_pull_arrived,
            MessageReady: self._on_message_ready,
            SliceUpdated: self._on_slice_updated,
            FrameSent: self._on_frame_sent,
            PeerLeft: self._on_peer_left,
        }

    def handle(self, event: Any) -> Sequence[StaleInstruction]:
        """The only way state changes; `RemoteProtocolError` leaves the state as it was."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InternalError(f"a server of workers apart does not know the event {event!r}")
        return handler(event)

    def waiting(self, slice_: int) -> tuple[int, ...]:
        """The ranks whose updates are in the values, and that still wait for slower ones."""
        return tuple(sorted(self._clocks[slice_].held))

    def owned(self, slice_: int) -> Slice:
        """The slice, if it is this server's; raises `RemoteProtocolError` otherwise."""
        self._clocks_of(slice_)
        return self._slices[slice_]

    def incomplete(self) -> list[tuple[int, int]]:
        """Slices that somebody waits for, because others are behind: (slice, step)."""
        held = ((number, clocks.held) for number, clocks in self._clocks.items() if clocks.held)
        return [(number, max(step for step, _ in each.values())) for number, each in held]

    def describe_wait(self, slice_: int, step: int) -> str:
        """What a slice waits for at this step, in words."""
        clocks = self._clocks_of(slice_)
        slowest = min(clocks.applied)
        behind = [rank for rank, last in enumerate(clocks.applied) if last == slowest]
        if clocks.held and step - slowest > self._apart:
            return (
                f"{clocks.name} waits for rank {behind[0]}, which is at step {slowest}: step {step}"
                f" may be {self._apart:g} ahead"
            )
        if step > max(clocks.pushed):
            return f"{clocks.name} has not been pushed"
        queued = sum(1 for due in self._updates.items() if due.update.slice == slice_)
        return f"{clocks.name} has {queued} updates queued, of {len(self._updates)}"

    def _clocks_of(self, slice_: int) -> _Clocks:
        clocks = self._clocks.get(slice_)
        if clocks is None:
            raise RemoteProtocolError(f"slice {slice_} does not belong to server {self._index}")
        return clocks

    # Handlers.
    def _on_push_arrived(self, event: PushArrived) -> Sequence[StaleInstruction]:
        rank, slice_, step, priority, flags = event
        clocks = self._checked(event)
        clocks.pushed[rank] = step
        if unfit := _maybe_unfit(event, clocks.name):
            return [unfit]
        has_gradient = not flags & Flag.NO_GRADIENT
        if not self._apart:
            return self._gather(clocks, event, has_gradient)
        ranks = (rank,) if has_gradient else ()
        return self._enqueue(_Due(UpdateSlice(slice_, step, ranks), (rank,), priority), clocks)

    def _checked(self, event: PushArrived) -> _Clocks:
        rank, slice_, step = event[:3]
        clocks = self._clocks_of(slice_)
        self._check_rank(rank)
        what = f"rank {rank} pushed slice {slice_} of {clocks.name} for step {step}"
        if rank in self._left:
            raise RemoteProtocolError(f"{what} after its goodbye")
        last = clocks.pushed[rank]
        if step <= last or (not self._apart and step != last + 1):
            raise RemoteProtocolError(f"{what} after step {last}")
        if clocks.answered[rank] != last:
            raise RemoteProtocolError(f"{what} before it was answered about step {last}")
        return clocks

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._workers:
            raise RemoteProtocolError(f"rank {rank} of a world of {self._workers}")

    def _on_value_arrived(self, event: ValueArrived) -> Sequence[StaleInstruction]:
        """To begin from; or rank 0's as it reads them, which the shell compares."""
        rank, slice_, step, priority = event
        clocks = self._clocks_of(slice_)
        if rank != 0:
            raise RemoteProtocolError(f"rank {rank} sent values; only rank 0 may")
        if step > 0:
            return []
        if clocks.has_values or any(clocks.pushed):
            raise RemoteProtocolError(f"values for slice {slice_} came twice or late")
        clocks.has_values = True
        for other in range(1, self._workers):
            self._send_values(other, slice_, priority)
        return [InstallValue(slice_), *self._lanes.depart()]

    def _on_pull_arrived(self, event: PullArrived) -> Sequence[StaleInstruction]:
        rank, slice_, step, priority, _ = event
        clocks = self._clocks_of(slice_)
        self._check_rank(rank)
        if step or clocks.answered[rank] != clocks.pushed[rank]:
            raise RemoteProtocolError(
                f"rank {rank} pulled slice {slice_} of step {step}, and was answered about step"
                f" {clocks.answered[rank]} of {clocks.pushed[rank]}"
            )
        clocks.seen[rank] = clocks.version
        self._send_values(rank, slice_, priority)
        return self._lanes.depart()

    def _send_values(self, rank: int, slice_: int, priority: int) -> None:
        frame = SendFrame(rank, Kind.REPLY, 0, slice_, priority, 0, NO_TOKEN)
        self._lanes.push(rank, 0, priority, frame)

    def _on_message_ready(self, event: MessageReady) -> Sequence[StaleInstruction]:
        """A control frame."""
        peer, kind, step, priority, slice_, token, flags = event
        frame = SendFrame(peer, kind, step, slice_, priority, flags, token)
        self._lanes.push(peer, step, priority, frame)
        return self._lanes.depart()

    def _gather(
        self, clocks: _Clocks, event: PushArrived, has_gradient: bool
    ) -> Sequence[StaleInstruction]:
        """BSP: one update of all pushes, in rank order."""
        rank, slice_, step, priority, _ = event
        clocks.gathered[rank] = (priority, has_gradient)
        if len(clocks.gathered) < self._workers:
            return self._stuck(clocks)
        pushers = tuple(sorted(clocks.gathered))
        ranks = tuple(each for each in pushers if clocks.gathered[each][1])
        most_urgent = min(urgency for urgency, _ in clocks.gathered.values())
        clocks.gathered.clear()
        return self._enqueue(_Due(UpdateSlice(slice_, step, ranks), pushers, most_urgent), clocks)

    def _enqueue(self, due: _Due, clocks: _Clocks) -> Sequence[StaleInstruction]:
        """Those that are most behind first, so that the others wait less."""
        self._updates.push(due.update.step, due.priority, due)
        return [*self._stuck(clocks), *self._next_update()]

    def _on_slice_updated(self, _: SliceUpdated) -> Sequence[StaleInstruction]:
        due, self._updating = self._updating, None
        if due is None:
            raise InternalError("an update finished that nobody started")
        update, pushers, priority = due
        clocks = self._clocks[update.slice]
        clocks.version += bool(update.ranks)
        for rank in pushers:
            clocks.applied[rank] = update.step
            clocks.held[rank] = (update.step, priority)
        self._answer_fresh(update.slice, clocks)
        return [*self._lanes.depart(), *self._next_update()]

    def _answer_fresh(self, slice_: int, clocks: _Clocks) -> None:
        """All that no longer have to wait for slower ones."""
        slowest = min(clocks.applied)
        for rank in sorted(clocks.held):
            step, priority = clocks.held[rank]
            if step - slowest > self._apart:
                continue
            del clocks.held[rank]
            clocks.answered[rank] = step
            unchanged = Flag.UNCHANGED if clocks.seen[rank] == clocks.version else 0
            clocks.seen[rank] = clocks.version
            frame = SendFrame(rank, Kind.REPLY, step, slice_, priority, int(unchanged), NO_TOKEN)
            self._lanes.push(rank, step, priority, frame)

    def _on_frame_sent(self, event: FrameSent) -> Sequence[StaleInstruction]:
        return self._lanes.sent(event.peer)

    def _on_peer_left(self, event: PeerLeft) -> Sequence[StaleInstruction]:
        self._left.add(event.rank)
        for clocks in self._clocks.values():
            if stuck := self._stuck(clocks):
                return stuck
        return [Finish()] if len(self._left) == self._workers else []

    # Shared pieces.
    def _stuck(self, clocks: _Clocks) -> Sequence[FailSession]:
        """Fail if somebody waits for one that has left."""
        ahead = max(clocks.pushed)
        for rank in sorted(self._left):
            last = clocks.pushed[rank]
            if ahead - last <= self._apart:
                continue
            reason = (
                f"rank {rank} has left the session after step {last}, but rank"
                f" {clocks.pushed.index(ahead)} is at step {ahead}, and may be {self._apart:g}"
                f" steps ahead with {clocks.name}: all ranks must make the same number of steps"
            )
            return [FailSession(reason, rank, last)]
        return []

    def _next_update(self) -> Sequence[UpdateSlice]:
        if self._updating is not None or not self._updates.heap:
            return []
        self._updating = self._updates.pop()
        return [self._updating.update]


def _maybe_unfit(event: PushArrived, name: str) -> FailSession | None:
    """Of a push that has no meaning where each is an update by itself."""
    rank, _, step, _, flags = event
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
    """The gradient as it would be about ``now``, where it was computed about ``then``.

    g + lambda g g (w - w_bak), elementwise, with lambda = ``strength`` from 0: DC-ASGD (Zheng et
    al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017, section 4).
    ``then``: what the worker was last answered. 0 gives the gradient itself, to the bit.
    """
    if not 0 <= strength < math.inf:
        raise ConfigError(f"strength is {strength!r}; it must be finite and at least 0")
    if not strength:
        return gradient
    return gradient + gradient * gradient * (now - then) * strength
