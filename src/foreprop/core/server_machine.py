"""The server's side of the protocol as a state machine (P3Server, P3 section 4.2).

Theory of operation. A slice that has been pushed by every worker enters the update queue; one
update is under way at a time, the most urgent first. The shell sums the gradients in rank order,
whatever order they came in, so the bits never depend on timing. An updated slice goes back to every
worker at once, with the priority that its pushes carried, through a send queue for each worker
(`core.sendqueue`). If updates need the norm of all gradients, sum and update are two operations,
with a ``barrier`` between them (`core.barrier`). Where updates are done elsewhere, as for a relay
(`core.relay_machine`), each is *deferred* instead, and many may be.

Rules: every worker pushes a slice for the same step, once; steps of a slice increase. A worker
that has said goodbye is not waited for: whoever still needs it makes the session fail with its
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from foreprop.core.barrier import HeldSums, StepBarrier
from foreprop.core.collect import (
    NEVER,
    PushCollector,
    Pushes,
    Replies,
    SendSquares,
    SliceSummed,
    SliceUpdated,
    SumSlice,
    UpdateAnswered,
    UpdateDeferred,
    UpdateSlice,
    with_gradient,
)
from foreprop.core.frames import (
    SERVER,
    FailSession,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    NormArrived,
    PeerLeft,
    Peers,
    PullArrived,
    PushArrived,
    SendFrame,
    SendNormPart,
    ValueArrived,
    each_worker,
)
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.sendqueue import USUAL_TURNS, Order, Reply, SendQueue, Turns
from foreprop.core.slicing import Slice
from foreprop.core.wire import ROUND_SHIFT, Flag
from foreprop.errors import InternalError, RemoteProtocolError

ServerInstruction = (
    SendFrame
    | UpdateSlice
    | SumSlice
    | SendNormPart
    | SendSquares
    | InstallValue
    | FailSession
    | Finish
)


class _SliceState:
    __slots__ = ("priority", "pushes", "valued")

    def __init__(self, number: int, name: str) -> None:
        self.pushes = Pushes(
            name, what=f"slice {number} of {name}", use=f"pushed a slice of {name}"
        )
        self.priority = 0  # the most urgent that a push of its step has carried
        self.valued = False  # rank 0 sent values for the step being collected


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
        self._peers = peers or each_worker(workers)
        self._peers_count = self._peers.count
        self._everybody = tuple(range(self._peers.count))
        self._slices = {piece.number: piece for piece in slices if piece.server == index}
        self._states = {
            number: _SliceState(number, names[piece.parameter])
            for number, piece in self._slices.items()
        }
        all_pushes = {number: state.pushes for number, state in self._states.items()}
        self._collector = PushCollector(all_pushes, self._peers)
        self._barrier = barrier
        self._held = HeldSums(barrier, "slice")
        self._deferred: dict[int, UpdateSlice] = {}  # by slice
        self._updates: SendQueue[UpdateSlice | SumSlice] = SendQueue(order)
        self._updating: UpdateSlice | SumSlice | None = None
        self._measured: dict[int, tuple[UpdateSlice, tuple[SquareSum, ...], int]] = {}
        """Averaged, by slice, until all of the round are; the flags of the answer last."""
        self._replies = Replies(self._peers, order=order, reply=reply, turns=turns)
        self._handlers: dict[type, Callable[[Any], Sequence[ServerInstruction]]] = {
            PushArrived: self._on_push_arrived,
            ValueArrived: self._on_value_arrived,
            PullArrived: self._on_pull_arrived,
            SliceUpdated: self._on_slice_updated,
            UpdateDeferred: self._on_update_deferred,
            UpdateAnswered: self._on_update_answered,
            SliceSummed: self._on_slice_summed,
            NormArrived: self._on_norm_arrived,
            FrameSent: self._on_frame_sent,
            MessageReady: self._on_message_ready,
            PeerLeft: self._on_peer_left,
        }

    def handle(self, event: Any) -> Sequence[ServerInstruction]:
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
        return len(self._replies.lanes)

    @property
    def update_depth(self) -> int:
        return len(self._updates)

    @property
    def sending_to(self) -> set[int]:
        return {frame.peer for frame in self._replies.lanes.items()}

    def describe_wait(self, slice_: int, step: int) -> str:
        """What a slice waits for at this step, in words."""
        self.owned(slice_)
        pushes = self._states[slice_].pushes
        name = pushes.name
        if pushes.done_step >= step:
            return f"{name} is updated; {self._replies.describe(slice_)}"
        missing = self._collector.missing(pushes, step)
        if missing:
            return f"{name} waits for the push of {self._peers.names(missing)}"
        if slice_ in self._deferred:
            return f"{name} is summed and waits for server {self._index}"
        if self._updating is not None and self._updating.slice == slice_:
            return f"{name} is being updated"
        if slice_ in self._measured:
            waiting = [s for s in self._slices if s not in self._measured]
            return f"{name} is averaged; {self.describe_wait(waiting[0], step)}"
        if slice_ in self._held:
            others = (self.describe_wait(*each) for each in self.incomplete())
            return f"{name} is summed and waits for {self._held.describe(others)}"
        return f"{name} is queued for its update, with {len(self._updates) - 1} other slices"

    def priority_of(self, slice_: int) -> int:
        """The most urgent that a push of its step has carried."""
        return self._states[slice_].priority

    def is_fresh(self, slice_: int) -> bool:
        """Whether the slice is this server's, and has no values yet."""
        return slice_ in self._states and self._states[slice_].pushes.done_step < 0

    def is_pulled(self, slice_: int) -> bool:
        """Whether somebody waits for this slice's next update."""
        return self._replies.is_pulled(slice_)

    def incomplete(self) -> list[tuple[int, int]]:
        """Slices that some but not all workers have pushed: (slice, step)."""
        return self._collector.incomplete()

    # Handlers.
    def _on_push_arrived(self, event: PushArrived) -> Sequence[ServerInstruction]:
        self.owned(event.slice)
        state = self._states[event.slice]
        pushed = self._collector.add(event, event.flags >> ROUND_SHIFT)
        if len(pushed) == 1 or event.priority < state.priority:
            state.priority = event.priority
        if len(pushed) < self._peers_count:
            return self._collector.missing_for_ever(state.pushes)
        return self._complete(event.slice, event.step, pushed)

    def _complete(
        self, slice_: int, step: int, pushed: Mapping[int, int]
    ) -> Sequence[ServerInstruction]:
        state, any_flags = self._states[slice_], next(iter(pushed.values()))
        if len(set(pushed.values())) > 1:
            unlike = self._collector.unlike_values(state.pushes, step)
            unlike = unlike or self._unlike_updates(state.pushes, step)
            if unlike:
                return unlike
            ranks = with_gradient(pushed)
        else:
            ranks = () if any_flags & Flag.NO_GRADIENT else self._everybody
        gradient, measure = bool(any_flags & Flag.GRADIENT), bool(any_flags & Flag.MEASURE)
        if self._barrier is None or gradient:
            update = UpdateSlice(slice_, step, ranks, gradient, measure)
            self._updates.push(step, state.priority, update)
        elif ranks:
            self._updates.push(step, state.priority, SumSlice(slice_, step, ranks))
        else:
            return self._held.hold(slice_, step, ranks, ZERO)
        return self._next_update()

    def _unlike_updates(self, pushes: Pushes, step: int) -> list[FailSession]:
        """Fail if some workers update the parameter themselves, and others want it updated."""
        unlike = self._collector.split(pushes.at(step), Flag.GRADIENT)
        if unlike is None:
            return []
        updating, rest = unlike
        reason = (
            f"{updating} update {pushes.name} themselves in step {step}, but {rest} leave it to"
            " the servers: the loop must use gradients alike on every rank; or set"
            " update='workers'"
        )
        return [FailSession(reason, -1, step)]

    def _on_slice_summed(self, event: SliceSummed) -> Sequence[ServerInstruction]:
        summed, self._updating = self._updating, None
        if not isinstance(summed, SumSlice):
            raise InternalError("a sum is done that nobody started")
        told = self._held.hold(*summed, event.part)
        return [*told, *self._next_update()]

    def _on_norm_arrived(self, event: NormArrived) -> Sequence[ServerInstruction]:
        if self._barrier is None or event.rank != 0:
            raise RemoteProtocolError(
                f"{self._peers.name(event.rank)} sent the norm of step {event.step}, which is not"
                " awaited"
            )
        self._barrier.release(event.step)
        for slice_, ranks in self._held.release(skip=event.skip):
            update = UpdateSlice(slice_, event.step, ranks)
            self._updates.push(event.step, self._states[slice_].priority, update)
        return self._next_update()

    def _on_value_arrived(self, event: ValueArrived) -> Sequence[ServerInstruction]:
        rank, slice_, step, priority = event
        self.owned(slice_)
        state = self._states[slice_]
        done_step = state.pushes.done_step
        if rank != SERVER:
            self._collector.check_first(rank)
        if step <= done_step or state.valued or 0 in state.pushes.collecting:
            late = f"step {done_step} is done" if step <= done_step else "twice or late"
            raise RemoteProtocolError(f"values for slice {slice_} came for step {step}: {late}")
        if step > 0:
            state.valued = True
            return []
        state.pushes.done, state.priority = (0, 0), priority
        self._replies.offer(slice_, priority, giver=rank)
        return [InstallValue(slice_), *self._replies.lanes.depart()]

    def _on_pull_arrived(self, event: PullArrived) -> Sequence[ServerInstruction]:
        self.owned(event.slice)
        self._replies.check_pulls(event)
        self._collector.check_rank(event.rank)
        self._replies.pull(event, self._states[event.slice].pushes)
        return self._replies.lanes.depart()

    def _on_slice_updated(self, event: SliceUpdated) -> Sequence[ServerInstruction]:
        update = self._take_update()
        changed = update.ranks or (self._states[update.slice].valued and not update.gradient)
        unchanged = 0 if changed else Flag.UNCHANGED
        if event.squares:
            noted = self._note_squares(update, event.squares, unchanged)
            return [*noted, *self._next_update()]
        self._finish(update, unchanged)
        return [*self._replies.lanes.depart(), *self._next_update()]

    def _note_squares(
        self, update: UpdateSlice, squares: tuple[SquareSum, ...], unchanged: int
    ) -> Sequence[ServerInstruction]:
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
        told = SendSquares(update.step, tuple(chain.from_iterable(s for _, s, _ in measured)))
        return [told, *self._replies.lanes.depart()]

    def _on_update_deferred(self, _: UpdateDeferred) -> Sequence[ServerInstruction]:
        update = self._take_update()
        self._deferred[update.slice] = update
        return self._next_update()

    def _on_update_answered(self, event: UpdateAnswered) -> Sequence[ServerInstruction]:
        update = self._deferred.pop(event.slice, None)
        if update is None or update.step != event.step:
            raise InternalError(f"an update was answered that nobody deferred: {event}")
        self._finish(update, event.flags & Flag.UNCHANGED)
        return self._replies.lanes.depart()

    def _take_update(self) -> UpdateSlice:
        update, self._updating = self._updating, None
        if not isinstance(update, UpdateSlice):
            raise InternalError("an update finished that nobody started")
        return update

    def _finish(self, update: UpdateSlice, unchanged: int) -> None:
        state = self._states[update.slice]
        pushes = state.pushes  # of one round: nobody was allowed to be ahead
        pushes.done = min(pushes.rounds, default=NEVER)
        pushes.rounds.clear()
        state.valued = False
        slice_, step, _, is_average, _ = update
        self._replies.answer(slice_, step, state.priority, int(unchanged), is_average=is_average)

    def _on_frame_sent(self, event: FrameSent) -> Sequence[ServerInstruction]:
        return self._replies.lanes.sent(event.peer)

    def _on_message_ready(self, event: MessageReady) -> Sequence[ServerInstruction]:
        self._replies.send(event)
        return self._replies.lanes.depart()

    def _on_peer_left(self, event: PeerLeft) -> Sequence[ServerInstruction]:
        failure = self._collector.leave(event.rank)
        return [*failure] or ([Finish()] if self._collector.all_left else [])

    # Shared pieces.
    def _next_update(self) -> Sequence[ServerInstruction]:
        if self._updating is not None or not self._updates.heap:
            return []
        self._updating = self._updates.pop()
        return [self._updating]
