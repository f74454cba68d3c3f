"""The server's side of the protocol as a state machine (P3Server, P3 section 4.2).

Theory of operation. A slice is ready, collected, closed, held at the barrier if there is one,
combined and answered. Which pushes close it, and whom it then answers, its *closing rule* says
(`core.closing`). A closed slice enters the update queue; one update is under way at a time, the
most urgent first. The shell sums the gradients in rank order, whatever order they came in, so the
bits never depend on timing. Answers leave at once, with the priority that the pushes carried,
through a send queue for each worker (`core.sendqueue`). If updates need the norm of all gradients,
sum and update are two operations, with a ``barrier`` between them (`core.barrier`). Where updates
are done elsewhere, as for a relay (`core.relay_machine`), each is *deferred* instead, and many may
be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from foreprop.core.barrier import HeldSums, StepBarrier
from foreprop.core.closing import AllMembers, ClosingRule, States
from foreprop.core.collect import (
    NEVER,
    AnswerSlice,
    DropPush,
    Replies,
    SendSquares,
    SliceState,
    SliceSummed,
    SliceUpdated,
    SumSlice,
    UpdateAnswered,
    UpdateDeferred,
    UpdateSlice,
    check_giver,
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
from foreprop.core.takeover import SliceTakenOver
from foreprop.core.wire import Flag
from foreprop.errors import InternalError, RemoteProtocolError

ServerInstruction = (
    SendFrame
    | UpdateSlice
    | SumSlice
    | AnswerSlice
    | DropPush
    | SendNormPart
    | SendSquares
    | InstallValue
    | FailSession
    | Finish
)
"""And those that only a rule knows."""


class MakeRule(Protocol):
    def __call__(self, states: States, peers: Peers, /) -> ClosingRule: ...


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
        names: Sequence[str],
        reply: Reply = "broadcast",
        barrier: StepBarrier | None = None,
        peers: Peers | None = None,
        turns: Turns = USUAL_TURNS,
        closing: MakeRule = AllMembers,
    ) -> None:
        self._index = index
        self._peers = peers or each_worker(workers)
        self._slices = {piece.number: piece for piece in slices if piece.server == index}
        self._states = {
            number: _state_of(number, names[piece.parameter])
            for number, piece in self._slices.items()
        }
        self._closing = closing(self._states, self._peers)
        self._members = self._closing.members
        self._barrier = barrier
        self._held = HeldSums(barrier, "slice")
        self._deferred: dict[int, UpdateSlice] = {}  # by slice
        self._updates: SendQueue[UpdateSlice | SumSlice] = SendQueue(order)
        self._updating: UpdateSlice | SumSlice | None = None
        self._measured: dict[int, tuple[UpdateSlice, SquareSum, int]] = {}
        """Averaged, by slice, until all of the round are; the flags of the answer last."""
        self._replies = Replies(
            self._peers, order=order, reply=reply, turns=turns, binds=self._closing.binds
        )
        self._handlers: dict[type, Callable[[Any], Sequence[Any]]] = {
            PushArrived: self._on_push_arrived,
            ValueArrived: self._on_value_arrived,
            SliceTakenOver: self._on_slice_taken_over,
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

    def handle(self, event: Any) -> Sequence[Any]:
        """The only way state changes; `RemoteProtocolError` leaves the state as it was.

        Returns `ServerInstruction`s, and those of the closing rule.
        """
        handler = self._handlers.get(type(event))
        if handler is not None:
            return handler(event)
        of_rule = self._closing.handlers.get(type(event))
        if of_rule is None:
            raise InternalError(f"a server does not know the event {event!r}")
        return self._go_on(of_rule(event))

    # Read-only views.
    def owned(self, slice_: int) -> Slice:
        """The slice, if it is this server's; raises `RemoteProtocolError` otherwise."""
        piece = self._slices.get(slice_)
        if piece is None:
            raise RemoteProtocolError(f"slice {slice_} does not belong to server {self._index}")
        return piece

    def _state(self, slice_: int) -> SliceState:
        self.owned(slice_)
        return self._states[slice_]

    @property
    def queue_depth(self) -> int:
        return len(self._replies.lanes)

    @property
    def update_depth(self) -> int:
        return len(self._updates)

    @property
    def sending_to(self) -> set[int]:
        return {frame.peer for frame in self._replies.lanes.items()}

    def has_sent_all(self, rank: int) -> bool:
        """Whether nothing for this peer is queued or under way."""
        return self._replies.lanes.is_idle(rank)

    def describe_wait(self, slice_: int, step: int) -> str:
        """What a slice waits for at this step, in words."""
        state = self._state(slice_)
        name = state.name
        if waits := self._closing.describe(state, step):
            return f"{name} {waits}"
        if state.done_step >= step:
            return f"{name} is updated; {self._replies.describe(slice_)}"
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

    def priorities(self) -> list[tuple[int, int]]:
        """By slice, as it was pushed last."""
        return [(number, state.priority) for number, state in self._states.items()]

    def is_fresh(self, slice_: int) -> bool:
        """Whether the slice is this server's, and has no values yet."""
        return slice_ in self._states and self._states[slice_].done_step < 0

    def is_pulled(self, slice_: int) -> bool:
        """Whether somebody waits for this slice's next update."""
        return self._replies.is_pulled(slice_)

    def incomplete(self) -> list[tuple[int, int]]:
        """Slices that some wait for, because others have not pushed: (slice, step)."""
        return self._closing.incomplete()

    def awaited(self) -> set[int]:
        """The members that some slice waits for, or that stay when others have left."""
        found: set[int] = set()
        for slice_, step in self.incomplete():
            found.update(self._closing.missing(self._states[slice_], step))
        return found | (self._members.here - self._members.left if self._members.left else set())

    def can_spare(self, rank: int) -> bool:
        """Whether the session can go on without this member."""
        return self._closing.can_spare(rank)

    # Collecting and closing.
    def _on_push_arrived(self, event: PushArrived) -> Sequence[Any]:
        state = self._states.get(event.slice) or self._state(event.slice)
        return self._go_on(self._closing.add(state, event))

    def _go_on(self, told: Sequence[Any]) -> Sequence[Any]:
        """What a rule has said: rounds that are closed queue for their update."""
        followed: list[Any] = []
        for each in told:
            if type(each) is not UpdateSlice:
                followed.append(each)
                continue
            slice_, step, ranks = each[:3]
            if self._barrier is not None and not each.gradient and not ranks:
                followed += self._held.hold(slice_, step, ranks, ZERO)
                continue
            needs_sum = self._barrier is not None and not each.gradient
            due = SumSlice(slice_, step, ranks) if needs_sum else each
            self._updates.push(step, self._states[slice_].priority, due)
            followed += self._next_update()
        return followed

    def _on_peer_left(self, event: PeerLeft) -> Sequence[Any]:
        told = self._closing.leave(event.rank)
        return told or ([Finish()] if self._members.all_left else [])

    # The barrier.
    def _on_slice_summed(self, event: SliceSummed) -> Sequence[Any]:
        summed, self._updating = self._updating, None
        if not isinstance(summed, SumSlice):
            raise InternalError("a sum is done that nobody started")
        told = self._held.hold(*summed, event.part)
        return [*told, *self._next_update()]

    def _on_norm_arrived(self, event: NormArrived) -> Sequence[Any]:
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

    # Updating.
    def _next_update(self) -> Sequence[Any]:
        if self._updating is not None or not self._updates.heap:
            return []
        self._updating = self._updates.pop()
        return [self._updating]

    def _on_slice_updated(self, event: SliceUpdated) -> Sequence[Any]:
        update, self._updating = self._updating, None
        if not isinstance(update, UpdateSlice):
            raise InternalError("an update finished that nobody started")
        is_valued = self._states[update.slice].valued == update.step and not update.gradient
        flags = 0 if update.ranks or is_valued else int(Flag.UNCHANGED)
        if event.squares is not None:
            noted = self._note_squares(update, event.squares, flags)
            return [*noted, *self._next_update()]
        return [*self._finish(update, flags), *self._replies.lanes.depart(), *self._next_update()]

    def _note_squares(self, update: UpdateSlice, squares: SquareSum, flags: int) -> Sequence[Any]:
        """With the last slice of a round all of them are told.

        Until then no average goes back: workers cannot use any before they know the norm, and on
        a shared link averages would hold up gradients, and so the norm.
        """
        self._measured[update.slice] = (update, squares, flags)
        if len(self._measured) < len(self._slices):
            return []
        measured = [self._measured[slice_] for slice_ in sorted(self._slices)]
        self._measured.clear()
        told: list[Any] = [SendSquares(update.step, tuple(each[1] for each in measured))]
        for held, _, flags_of in measured:
            told += self._finish(held, flags_of)
        return [*told, *self._replies.lanes.depart()]

    def _on_update_deferred(self, _: UpdateDeferred) -> Sequence[Any]:
        update, self._updating = self._updating, None
        if not isinstance(update, UpdateSlice):
            raise InternalError("an update was deferred that nobody started")
        self._deferred[update.slice] = update
        return self._next_update()

    def _on_update_answered(self, event: UpdateAnswered) -> Sequence[Any]:
        update = self._deferred.pop(event.slice, None)
        if update is None or update.step != event.step:
            raise InternalError(f"an update was answered that nobody deferred: {event}")
        return [*self._finish(update, event.flags & Flag.UNCHANGED), *self._replies.lanes.depart()]

    # Answering.
    def _finish(self, update: UpdateSlice, flags: int) -> Sequence[Any]:
        answers = self._closing.updated(self._states[update.slice], update, flags)
        return self._replies.answer(answers, is_average=update.gradient)

    def _on_value_arrived(self, event: ValueArrived) -> Sequence[Any]:
        rank, slice_, step, priority = event
        state = self._state(slice_)
        if rank != SERVER:
            check_giver(self._peers, rank)
        if step and self._closing.may_be_apart:
            return []  # the shell compares them
        state.take_values(step, state.collecting)
        if step:
            return []
        others = tuple(each for each in sorted(self._members.of_step(0)) if each != rank)
        return self._install(state, AnswerSlice(slice_, 0, priority, others))

    def _on_slice_taken_over(self, event: SliceTakenOver) -> Sequence[Any]:
        """On a substitute (`core.takeover`). Pushes of the step after it may be here already."""
        slice_, step, priority, owed = event
        state = self._state(slice_)
        if state.done != NEVER:
            raise RemoteProtocolError(f"slice {slice_} is taken over twice")
        state.done = (step, 0)
        return self._install(state, AnswerSlice(slice_, step, priority, owed))

    def _install(self, state: SliceState, answer: AnswerSlice) -> Sequence[Any]:
        if not state.rounds:
            state.priority = answer.priority
        followed = self._replies.answer([answer])
        return [InstallValue(answer.slice), *followed, *self._replies.lanes.depart()]

    def _on_pull_arrived(self, event: PullArrived) -> Sequence[Any]:
        rank, slice_, step, priority, _ = event
        state = self._state(slice_)
        self._members.check_rank(rank)
        if not self._closing.may_be_apart:
            self._replies.pull(event, state)
            return self._replies.lanes.depart()
        if step or rank in state.owed or state.done == NEVER:
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pulled slice {slice_} of step {step}; it may ask for the"
                " values of now (step 0), when it is owed no answer"
            )
        followed = self._replies.answer([AnswerSlice(slice_, 0, priority, (rank,))])
        return [*followed, *self._replies.lanes.depart()]

    # Frames.
    def _on_frame_sent(self, event: FrameSent) -> Sequence[Any]:
        return self._replies.lanes.sent(event.peer)

    def _on_message_ready(self, event: MessageReady) -> Sequence[Any]:
        self._replies.send(event)
        return self._replies.lanes.depart()


def _state_of(number: int, name: str) -> SliceState:
    what, use = f"slice {number} of {name}", f"pushed a slice of {name}"
    return SliceState(number, name, what=what, use=use)
