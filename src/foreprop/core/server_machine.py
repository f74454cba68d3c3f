"""The server's side of the protocol as a state machine (P3Server, P3 section 4.2).

Theory of operation. A slice that has been pushed by every worker enters the update queue; one
update is under way at a time, the most urgent first. The shell sums the gradients in rank order,
whatever order they came in, so the bits never depend on timing. An updated slice goes back to
every worker at once, with the priority that its pushes carried, through one send queue in front
of the server's link. If updates need the norm of all gradients, sum and update are two operations,
with a ``barrier`` between them (`core.barrier`). Where updates are done elsewhere, as for a relay
(`core.relay_machine`), each is *deferred* instead, and many may be.

Rules: every worker pushes a slice for the same step, once; steps of a slice increase. A worker
that has said goodbye is not waited for: whoever still needs it makes the session fail with its
name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from foreprop.core.barrier import StepBarrier, TellNormPart
from foreprop.core.manifest import Reply
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.peers import SERVER, Peers, each_worker
from foreprop.core.sendqueue import USUAL_TURNS, Order, SendLanes, SendQueue, Turns
from foreprop.core.slicing import Slice
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.core.worker_machine import NO_TOKEN, FrameSent, SendFrame
from foreprop.errors import InternalError, RemoteProtocolError

# `FrameSent` and `SendFrame` mean the same on both sides; here `peer` is the number of a worker, or
# of a relay (`core.peers`), and so is `rank`: without local aggregation, a worker's rank.


# Events.
class PushArrived(NamedTuple):
    rank: int
    slice: int
    step: int
    priority: int
    flags: int


class ValueArrived(NamedTuple):
    rank: int
    """`SERVER` for a relay that has them from there."""
    slice: int
    step: int
    priority: int


class PullArrived(NamedTuple):
    rank: int
    slice: int
    step: int
    priority: int


class UpdateFinished(NamedTuple):
    """The update under way is done."""

    squares: SquareSum | None = None
    """Of the aggregated gradient, if it was to be measured."""


class UpdateDeferred(NamedTuple):
    """The update under way is done elsewhere; `UpdateAnswered` will say that it is done."""


class UpdateAnswered(NamedTuple):
    """A deferred update is done."""

    slice: int
    step: int
    flags: int
    """Of the answer: maybe ``UNCHANGED``."""


class SliceSummed(NamedTuple):
    """The sum under way is done; ``part`` is that of its squares."""

    part: SquareSum


class NormArrived(NamedTuple):
    """Rank 0 tells the norm of all gradients of a step."""

    rank: int
    step: int
    skip: bool = False
    """No slice is to be updated in this step."""


class AnswerReady(NamedTuple):
    """A control frame for one worker; the payload stays with the shell under ``token``."""

    rank: int
    kind: int
    step: int
    priority: int
    slice: int
    token: int


class WorkerLeft(NamedTuple):
    rank: int


# Instructions.
class UpdateSlice(NamedTuple):
    slice: int
    step: int
    ranks: tuple[int, ...]
    """The ranks that had a gradient, ascending; the others count as zeros. Empty: no update."""
    gradient: bool = False
    """The workers update: the aggregated gradient is the answer, and the values stay."""
    measure: bool = False
    """Say in `UpdateFinished` what its squares add up to."""


class SumSlice(NamedTuple):
    """Add up the gradients, and keep the sum for the update."""

    slice: int
    step: int
    ranks: tuple[int, ...]


class TellSquares(NamedTuple):
    """Tell every worker the sums of squares of all slices, in the order of their numbers."""

    step: int
    squares: tuple[SquareSum, ...]


class InstallValue(NamedTuple):
    """Take the received values as the slice's parameters (start of the session)."""

    slice: int


class FailSession(NamedTuple):
    reason: str
    rank: int
    """The worker that is to blame, or -1."""
    step: int


class FinishSession(NamedTuple):
    """Every worker has said goodbye."""


ServerInstruction = (
    SendFrame
    | UpdateSlice
    | SumSlice
    | TellNormPart
    | TellSquares
    | InstallValue
    | FailSession
    | FinishSession
)


_NEVER = (-1, 0)


class _SliceState:
    __slots__ = ("done", "flags", "priority", "pulls", "round", "step", "unchanged", "valued")

    def __init__(self) -> None:
        self.done = _NEVER
        self.step = -1  # the step being collected
        self.round = 0  # of that step
        self.priority = 0
        self.flags: dict[int, int] = {}  # by rank, of the pushes that are in
        self.valued = False  # rank 0 sent values for the step being collected
        self.pulls: list[tuple[int, int]] = []  # (rank, step) that came before the update
        self.unchanged = 0  # the flag, if there is no average to be pulled: no rank had a gradient

    @property
    def done_step(self) -> int:
        return self.done[0]


class ServerMachine:
    """Decides what a server updates and sends next. Not thread-safe.

    ``names`` are the parameters' names, for messages; ``index`` is the server's own. ``workers`` is
    how many push to it, and ``peers`` who they are, who take ``turns``.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        index: int,
        workers: int,
        order: Order,
        reply: Reply,
        names: Sequence[str],
        barrier: StepBarrier | None = None,
        peers: Peers | None = None,
        turns: Turns = USUAL_TURNS,
    ) -> None:
        self._index = index
        self._workers = workers
        self._peers = peers or each_worker(workers)
        self._reply = reply
        self._names = names
        self._slices = {piece.number: piece for piece in slices if piece.server == index}
        self._states = {slice_: _SliceState() for slice_ in self._slices}
        self._barrier = barrier
        self._held: dict[int, tuple[int, ...]] = {}  # at the barrier: by slice, whose gradients
        self._deferred: dict[int, UpdateSlice] = {}  # by slice
        self._updates: SendQueue[UpdateSlice | SumSlice] = SendQueue(order)
        self._lanes: SendLanes[SendFrame] = SendLanes(order, turns=turns)
        self._updating: UpdateSlice | SumSlice | None = None
        self._measured: dict[int, tuple[UpdateSlice, SquareSum, int]] = {}
        """Averaged, by slice, until all of the round are; the flags of the answer last."""
        self._left: set[int] = set()
        self._handlers: dict[type, Callable[[Any], list[ServerInstruction]]] = {
            PushArrived: self._on_push_arrived,
            ValueArrived: self._on_value_arrived,
            PullArrived: self._on_pull_arrived,
            UpdateFinished: self._on_update_finished,
            UpdateDeferred: self._on_update_deferred,
            UpdateAnswered: self._on_update_answered,
            SliceSummed: self._on_slice_summed,
            NormArrived: self._on_norm_arrived,
            FrameSent: self._on_frame_sent,
            AnswerReady: self._on_answer_ready,
            WorkerLeft: self._on_worker_left,
        }

    def handle(self, event: Any) -> list[ServerInstruction]:
        """The only way state changes; `RemoteProtocolError` leaves the state as it was."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InternalError(f"a server does not know the event {event!r}")
        return handler(event)

    # Read-only views.
    def owned(self, slice_: int) -> Slice:
        """The slice, if it is this server's; raises `RemoteProtocolError` otherwise."""
        piece = self._slices.get(slice_)
        if piece is None:
            raise RemoteProtocolError(f"slice {slice_} does not belong to server {self._index}")
        return piece

    @property
    def queue_depth(self) -> int:
        return len(self._lanes)

    @property
    def update_depth(self) -> int:
        return len(self._updates)

    @property
    def sending_to(self) -> set[int]:
        return {frame.peer for frame in self._lanes.items()}

    def describe_wait(self, slice_: int, step: int) -> str:
        """What a slice waits for at this step, in words."""
        piece = self.owned(slice_)
        state, name = self._states[slice_], self._names[piece.parameter]
        if state.done_step >= step:
            kinds = (Kind.REPLY, Kind.NOTIFY)
            queued = [f for f in self._lanes.items() if f.slice == slice_ and f.kind in kinds]
            if not queued:
                return f"{name} is updated; no reply is queued"
            peers = self._peers.listed(sorted(frame.peer for frame in queued))
            return f"{name} is updated; replies still queued for {peers}"
        missing = [rank for rank in range(self._workers) if rank not in state.flags]
        if state.step != step:
            missing = list(range(self._workers))
        if missing:
            return f"{name} waits for the push of {self._peers.names(missing)}"
        if slice_ in self._deferred:
            return f"{name} is summed and waits for server {self._index}"
        if self._updating is not None and self._updating.slice == slice_:
            return f"{name} is being updated"
        if slice_ in self._measured:
            waiting = [s for s in self._slices if s not in self._measured]
            return f"{name} is averaged; {self.describe_wait(waiting[0], step)}"
        if self._barrier is not None and self._barrier.holds(slice_):
            return f"{name} is summed and waits for {self._describe_barrier()}"
        return f"{name} is queued for its update, with {len(self._updates) - 1} other slices"

    def _describe_barrier(self) -> str:
        text = self._barrier.describe() if self._barrier is not None else ""
        for slice_, step in self.incomplete():
            return f"{text}; {self.describe_wait(slice_, step)}"
        return text

    def priority_of(self, slice_: int) -> int:
        """The most urgent that a push of its step has carried."""
        return self._states[slice_].priority

    def is_fresh(self, slice_: int) -> bool:
        """Whether the slice is this server's, and has no values yet."""
        return slice_ in self._states and self._states[slice_].done_step < 0

    def is_pulled(self, slice_: int) -> bool:
        """Whether somebody waits for this slice's next update."""
        return bool(self._states[slice_].pulls)

    def incomplete(self) -> list[tuple[int, int]]:
        """Slices that some but not all workers have pushed: (slice, step)."""
        return [
            (slice_, state.step)
            for slice_, state in self._states.items()
            if 0 < len(state.flags) < self._workers
        ]

    # Handlers.
    def _on_push_arrived(self, event: PushArrived) -> list[ServerInstruction]:
        rank, slice_, step, priority, flags = event
        piece = self.owned(slice_)
        state = self._states[slice_]
        round_ = flags >> ROUND_SHIFT
        self._check_push(state, piece, rank, step, round_)
        if not state.flags:
            state.step, state.round, state.priority = step, round_, priority
        elif priority < state.priority:
            state.priority = priority
        state.flags[rank] = flags
        if len(state.flags) < self._workers:
            return self._missing_for_ever(slice_, state)
        return self._complete(slice_, state)

    def _check_push(
        self, state: _SliceState, piece: Slice, rank: int, step: int, round_: int
    ) -> None:
        name = self._names[piece.parameter]
        self._check_rank(rank)
        if rank in self._left:
            who = self._peers.name(rank)
            raise RemoteProtocolError(f"{who} pushed a slice of {name} after its goodbye")
        if rank in state.flags:
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pushed slice {piece.number} of {name} twice in step"
                f" {state.step}"
            )
        if (step, round_) <= state.done or step == 0:
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pushed slice {piece.number} of {name} for step {step},"
                f" which is past: step {state.done_step} is done"
            )
        if state.flags and (step, round_) != (state.step, state.round):
            if step == state.step:
                raise self._unlike_rounds(state, name, rank, round_)
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pushed slice {piece.number} of {name} for step {step}"
                f" while {self._peers.listed(sorted(state.flags))} are at step {state.step}"
            )

    def _unlike_rounds(
        self, state: _SliceState, name: str, rank: int, round_: int
    ) -> RemoteProtocolError:
        others = self._peers.listed(sorted(state.flags))
        return RemoteProtocolError(
            f"{self._peers.name(rank)} has averaged the gradient of {name} {round_} times before"
            f" in step {state.step}, {others} {state.round} times: run as many backward passes"
            " on every rank, and read gradients between them on every rank alike"
        )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._workers:
            raise RemoteProtocolError(f"rank {rank} of a world of {self._workers}")

    def _complete(self, slice_: int, state: _SliceState) -> list[ServerInstruction]:
        changed = [r for r, flags in state.flags.items() if flags & Flag.VALUE_CHANGED]
        if 0 < len(changed) < self._workers:
            name = self._names[self._slices[slice_].parameter]
            rest = self._peers.listed(sorted(set(range(self._workers)) - set(changed)))
            return [
                FailSession(
                    f"parameter {name} was changed by hand before step {state.step} on"
                    f" {self._peers.listed(sorted(changed))} but not on {rest}: change it on every"
                    " rank alike",
                    -1,
                    state.step,
                )
            ]
        unlike = self._unlike_updates(slice_, state)
        if unlike:
            return unlike
        ranks = tuple(sorted(r for r, f in state.flags.items() if not f & Flag.NO_GRADIENT))
        any_flags = next(iter(state.flags.values()))
        gradient, measure = bool(any_flags & Flag.GRADIENT), bool(any_flags & Flag.MEASURE)
        if self._barrier is None or gradient:
            update = UpdateSlice(slice_, state.step, ranks, gradient, measure)
            self._updates.push(state.step, state.priority, update)
        elif ranks:
            self._updates.push(state.step, state.priority, SumSlice(slice_, state.step, ranks))
        else:
            return self._hold(UpdateSlice(slice_, state.step, ranks), ZERO)
        return self._next_update()

    def _unlike_updates(self, slice_: int, state: _SliceState) -> list[ServerInstruction]:
        """Fail if some workers update the parameter themselves, and others want it updated."""
        updating = [rank for rank, flags in state.flags.items() if flags & Flag.GRADIENT]
        if len(updating) in (0, self._workers):
            return []
        name = self._names[self._slices[slice_].parameter]
        rest = self._peers.listed(sorted(set(range(self._workers)) - set(updating)))
        return [
            FailSession(
                f"{self._peers.listed(sorted(updating))} update {name} themselves in step"
                f" {state.step}, but {rest} leave it to the servers: the loop must use gradients"
                " alike on every rank; or set update='workers'",
                -1,
                state.step,
            )
        ]

    def _hold(self, summed: UpdateSlice | SumSlice, part: SquareSum) -> list[ServerInstruction]:
        """At the barrier until the step's norm is known."""
        if self._barrier is None:
            raise InternalError(f"slice {summed.slice} was summed, but no norm is needed")
        slice_, step, ranks = summed[:3]
        told = self._barrier.hold(step, slice_, part)
        self._held[slice_] = ranks
        return list(told)

    def _on_slice_summed(self, event: SliceSummed) -> list[ServerInstruction]:
        summed, self._updating = self._updating, None
        if not isinstance(summed, SumSlice):
            raise InternalError("a sum is done that nobody started")
        return self._hold(summed, event.part) + self._next_update()

    def _on_norm_arrived(self, event: NormArrived) -> list[ServerInstruction]:
        if self._barrier is None or event.rank != 0:
            raise RemoteProtocolError(
                f"{self._peers.name(event.rank)} sent the norm of step {event.step}, which is not"
                " awaited"
            )
        self._barrier.release(event.step)
        for slice_, ranks in self._held.items():
            update = UpdateSlice(slice_, event.step, () if event.skip else ranks)
            self._updates.push(event.step, self._states[slice_].priority, update)
        self._held.clear()
        return self._next_update()

    def _on_value_arrived(self, event: ValueArrived) -> list[ServerInstruction]:
        rank, slice_, step, priority = event
        self.owned(slice_)
        state = self._states[slice_]
        if rank != SERVER and self._peers.first_rank(rank) != 0:
            who = self._peers.name(rank)
            raise RemoteProtocolError(f"{who} sent parameter values; only rank 0 may")
        if step <= state.done_step or state.valued or 0 in state.flags:
            late = f"step {state.done_step} is done" if step <= state.done_step else "twice or late"
            raise RemoteProtocolError(f"values for slice {slice_} came for step {step}: {late}")
        if step > 0:
            state.valued = True
            return []
        state.done, state.priority = (0, 0), priority
        frames: list[ServerInstruction] = [InstallValue(slice_)]
        for rank_ in range(self._workers):
            if rank_ != rank:
                self._enqueue(rank_, Kind.REPLY, 0, slice_, priority, 0)
        return frames + self._departures()

    def _on_pull_arrived(self, event: PullArrived) -> list[ServerInstruction]:
        rank, slice_, step, priority = event
        self.owned(slice_)
        state = self._states[slice_]
        if self._reply == "broadcast":
            who = self._peers.name(rank)
            raise RemoteProtocolError(f"{who} pulled slice {slice_}; replies are broadcast")
        self._check_rank(rank)
        if (rank, step) in state.pulls:
            who = self._peers.name(rank)
            raise RemoteProtocolError(f"{who} pulled slice {slice_} twice in step {step}")
        pushed = rank in state.flags and step == state.step
        if not pushed and step != state.done_step:
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pulled slice {slice_} for step {step}, which it has not"
                " pushed;"
                f" step {state.done_step} is done"
            )
        if pushed:
            state.pulls.append((rank, step))
            return []
        self._enqueue(rank, Kind.REPLY, step, slice_, priority, state.unchanged)
        return self._departures()

    def _on_update_finished(self, event: UpdateFinished) -> list[ServerInstruction]:
        update = self._take_update()
        changed = update.ranks or (self._states[update.slice].valued and not update.gradient)
        unchanged = 0 if changed else Flag.UNCHANGED
        if event.squares is not None:
            return self._note_squares(update, event.squares, unchanged) + self._next_update()
        self._finish(update, unchanged)
        return self._departures() + self._next_update()

    def _note_squares(
        self, update: UpdateSlice, squares: SquareSum, unchanged: int
    ) -> list[ServerInstruction]:
        """With the last slice of a round all of them are told.

        Until then no average goes back: workers cannot use any before they know the norm, and on
        a shared link averages would hold up gradients, and so the norm.
        """
        self._measured[update.slice] = (update, squares, unchanged)
        if len(self._measured) < len(self._slices):
            return []
        measured = [self._measured[slice_] for slice_ in sorted(self._slices)]
        self._measured.clear()
        for held, _, flags in measured:
            self._finish(held, flags)
        told = TellSquares(update.step, tuple(squares for _, squares, _ in measured))
        return [told, *self._departures()]

    def _on_update_deferred(self, _: UpdateDeferred) -> list[ServerInstruction]:
        update = self._take_update()
        self._deferred[update.slice] = update
        return self._next_update()

    def _on_update_answered(self, event: UpdateAnswered) -> list[ServerInstruction]:
        update = self._deferred.pop(event.slice, None)
        if update is None or update.step != event.step:
            raise InternalError(f"an update was answered that nobody deferred: {event}")
        self._finish(update, event.flags & Flag.UNCHANGED)
        return self._departures()

    def _take_update(self) -> UpdateSlice:
        update, self._updating = self._updating, None
        if not isinstance(update, UpdateSlice):
            raise InternalError("an update finished that nobody started")
        return update

    def _finish(self, update: UpdateSlice, unchanged: int) -> None:
        state = self._states[update.slice]
        state.done, state.valued = (update.step, state.round), False
        state.unchanged = int(unchanged) if update.gradient else 0
        state.flags.clear()
        self._answer(update, state, int(unchanged))

    def _answer(self, update: UpdateSlice, state: _SliceState, unchanged: int) -> None:
        slice_, step, priority = update.slice, update.step, state.priority
        if self._reply == "pull":
            for rank, _ in state.pulls:
                self._enqueue(rank, Kind.REPLY, step, slice_, priority, state.unchanged)
            state.pulls.clear()
            return
        kind = Kind.REPLY if self._reply == "broadcast" else Kind.NOTIFY
        for rank in range(self._workers):
            self._enqueue(rank, kind, step, slice_, priority, unchanged)

    def _on_frame_sent(self, event: FrameSent) -> list[ServerInstruction]:
        return list(self._lanes.sent(event.peer))

    def _on_answer_ready(self, event: AnswerReady) -> list[ServerInstruction]:
        rank, kind, step, priority, slice_, token = event
        frame = SendFrame(rank, kind, step, slice_, priority, 0, token)
        self._lanes.push(rank, step, priority, frame)
        return self._departures()

    def _on_worker_left(self, event: WorkerLeft) -> list[ServerInstruction]:
        self._left.add(event.rank)
        for slice_, state in self._states.items():
            if state.flags:
                failure = self._missing_for_ever(slice_, state)
                if failure:
                    return failure
        return [FinishSession()] if len(self._left) == self._workers else []

    # Shared pieces.
    def _missing_for_ever(self, slice_: int, state: _SliceState) -> list[ServerInstruction]:
        for rank in sorted(self._left):
            if rank not in state.flags:
                name = self._names[self._slices[slice_].parameter]
                return [
                    FailSession(
                        f"{self._peers.name(rank)} has left the session, but"
                        f" {self._peers.listed(sorted(state.flags))} are at step {state.step} and"
                        f" need its gradient of {name}: all ranks must make the same number of"
                        " steps",
                        rank,
                        state.step - 1,
                    )
                ]
        return []

    def _enqueue(
        self, rank: int, kind: int, step: int, slice_: int, priority: int, flags: int
    ) -> None:
        frame = SendFrame(rank, kind, step, slice_, priority, flags, NO_TOKEN)
        self._lanes.push(rank, step, priority, frame)

    def _departures(self) -> list[ServerInstruction]:
        return list(self._lanes.depart())

    def _next_update(self) -> list[ServerInstruction]:
        if self._updating is not None or not self._updates:
            return []
        self._updating = self._updates.pop()
        return [self._updating]
