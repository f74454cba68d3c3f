"""The server's side of the protocol as a state machine (P3Server, P3 section 4.2).

Theory of operation. A slice is ready, collected, closed, held at the barrier if there is one,
combined and answered. Which pushes close it, and whom it then answers, its *closing rule* says
(`core.closing`). A closed slice enters the update queue; one update is under way at a time, the
most urgent first. The shell sums the gradients in rank order, whatever order they came in, so the
bits never depend on timing. Answers leave at once, with the priority that the pushes carried,
through a send queue for each peer (`core.sendqueue`). If updates need the norm of all gradients,
sum and update are two operations, with a ``barrier`` between them (`core.barrier`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from foreprop.core.barrier import HeldSums, StepBarrier
from foreprop.core.closing import ClosingRule, States
from foreprop.core.collect import (
    AnswerSlice,
    Replies,
    SendSquares,
    SliceState,
    SliceSummed,
    SliceUpdated,
    SumSlice,
    UpdateSlice,
    check_giver,
)
from foreprop.core.frames import (
    NO_TOKEN,
    SERVER,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    NormArrived,
    PeerLeft,
    Peers,
    PullArrived,
    PushArrived,
    ValueArrived,
    each_worker,
)
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.sendqueue import USUAL_TURNS, Order, Reply, SendQueue, Turns
from foreprop.core.slicing import Slice
from foreprop.core.takeover import SlicesSettled
from foreprop.core.wire import Flag, Kind
from foreprop.errors import InternalError, RemoteProtocolError

Rule = TypeVar("Rule", bound=ClosingRule)


class ServerMachine(Generic[Rule]):
    """Decides what a server updates and sends next. Not thread-safe.

    ``names`` are the parameters' names, for messages; ``index`` is the server's own. ``workers`` is
    how many push to it, and ``peers`` who they are, who take ``turns``. ``closing`` makes the rule.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        index: int,
        workers: int,
        order: Order,
        names: Sequence[str],
        closing: Callable[[States, Peers], Rule],
        reply: Reply = "broadcast",
        barrier: StepBarrier | None = None,
        peers: Peers | None = None,
        turns: Turns = USUAL_TURNS,
    ) -> None:
        self._index = index
        self._peers = peers or each_worker(workers)
        self._slices = {piece.number: piece for piece in slices if piece.server == index}
        self._names = names
        self._states = {
            number: _state_of(number, names[piece.parameter])
            for number, piece in self._slices.items()
        }
        self.closing = closing(self._states, self._peers)
        self._members = self.closing.members
        self._barrier = barrier
        self._held = HeldSums(barrier, "slice")
        self._updates: SendQueue[UpdateSlice | SumSlice] = SendQueue(order)
        self._updating: UpdateSlice | SumSlice | None = None
        self._measured: dict[int, tuple[UpdateSlice, tuple[SquareSum, ...], int]] = {}
        """Averaged, by slice, until all of the round are; the flags of the answer last."""
        self._replies = Replies(self._peers, order=order, reply=reply, turns=turns)
        self._handlers: dict[type, Callable[[Any], Sequence[Any]]] = {
            PushArrived: self._on_push_arrived,
            ValueArrived: self._on_value_arrived,
            SlicesSettled: self._on_slices_settled,
            PullArrived: self._on_pull_arrived,
            SliceUpdated: self._on_slice_updated,
            SliceSummed: self._on_slice_summed,
            NormArrived: self._on_norm_arrived,
            FrameSent: self._on_frame_sent,
            MessageReady: self._on_message_ready,
            PeerLeft: self._on_peer_left,
        }

    def handle(self, event: Any) -> Sequence[Any]:
        """The only way state changes; `RemoteProtocolError` leaves the state as it was."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            return handler(event)
        of_rule = self.closing.handlers.get(type(event))
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
        if waits := self.closing.describe(state, step):
            return f"{name} {waits}"
        if state.done_step >= step:
            return f"{name} is updated; {self._replies.describe(slice_)}"
        if self._updating is not None and self._updating.slice == slice_:
            return f"{name} is being updated"
        if slice_ in self._measured:
            waiting = [s for s in self._slices if s not in self._measured]
            return f"{name} is averaged; {self.describe_wait(waiting[0], step)}"
        if slice_ in self._held:
            others = (self.describe_wait(*each) for each in self.incomplete())
            return f"{name} is summed and waits for {self._held.describe(others)}"
        return f"{name} is queued for its update, with {len(self._updates) - 1} other slices"

    def priorities(self) -> list[tuple[int, int]]:
        """By slice, as it was pushed last."""
        return [(number, state.priority) for number, state in self._states.items()]

    def incomplete(self) -> list[tuple[int, int]]:
        """Slices that some wait for, because others have not pushed: (slice, step)."""
        return self.closing.incomplete()

    def awaited(self) -> set[int]:
        """The members that some slice waits for, or that stay when others have left."""
        found: set[int] = set()
        for slice_, step in self.incomplete():
            found.update(self.closing.missing(self._states[slice_], step))
        return found | (self._members.here - self._members.left if self._members.left else set())

    def can_spare(self, rank: int) -> bool:
        """Whether the session can go on without this member."""
        return self.closing.can_spare(rank)

    # Collecting and closing.
    def _on_push_arrived(self, event: PushArrived) -> Sequence[Any]:
        state = self._states.get(event.slice) or self._state(event.slice)
        return self._go_on(self.closing.add(state, event))

    def _go_on(self, told: Sequence[Any]) -> Sequence[Any]:
        """What a rule has said: what is closed queues for its update, answers for their peers."""
        followed: list[Any] = []
        for each in told:
            kind = type(each)
            if kind is UpdateSlice:
                slice_, step, ranks = each[:3]
                needs_norm = self._barrier is not None and not each.gradient
                if needs_norm and not ranks:
                    followed += self._held.hold(slice_, step, ranks, ZERO)
                    continue
                due = SumSlice(slice_, step, ranks) if needs_norm else each
                self._updates.push(step, self._states[slice_].priority, due)
                followed += self._next_update()
            elif kind is AnswerSlice and not self.closing.binds:
                self._replies.answer(each)
            elif kind is MessageReady:
                self._replies.send(each)
            elif kind is PullArrived:
                self._replies.pull(each, self._states[each.slice])
            elif kind is ValueArrived:
                followed += self._on_value_arrived(each)
            else:
                followed.append(each)
        if self._replies.lanes.queued:
            followed += self._replies.lanes.depart()
        return followed

    def _on_peer_left(self, event: PeerLeft) -> Sequence[Any]:
        return self._go_on(self.closing.leave(event.rank)) or self._end()

    def _end(self) -> list[Finish]:
        """All have said goodbye; what is passed on has left."""
        is_under_way = self.closing.passes_on and (self._updating or self._updates.heap)
        is_ended = self._members.all_left and not is_under_way and self.has_sent_all(SERVER)
        return [Finish()] if is_ended else []

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

    # Updating, and answering.
    def _next_update(self) -> Sequence[Any]:
        if self._updating is not None or not self._updates.heap:
            return []
        self._updating = self._updates.pop()
        return [self._updating]

    def _on_slice_updated(self, event: SliceUpdated) -> Sequence[Any]:
        update, self._updating = self._updating, None
        if not isinstance(update, UpdateSlice):
            raise InternalError("an update finished that nobody started")
        state = self._states[update.slice]
        is_valued = state.valued == update.step and not update.gradient
        flags = 0 if update.ranks or is_valued else int(Flag.UNCHANGED)
        if event.squares:
            told = self._note_squares(update, event.squares, flags)
        else:
            told = self.closing.updated(state, update, flags)
        return [*self._go_on(told), *self._next_update()]

    def _note_squares(
        self, update: UpdateSlice, squares: tuple[SquareSum, ...], flags: int
    ) -> Sequence[Any]:
        """With the last slice of a round all of them are told.

        Until then no average goes back: workers cannot use any before they know the norm, and on
        a shared link averages would hold up gradients, and so the norm.
        """
        self._measured[update.slice] = (update, squares, flags)
        if len(self._measured) < len(self._slices):
            return []
        measured = [self._measured[slice_] for slice_ in sorted(self._slices)]
        self._measured.clear()
        told: list[Any] = [
            SendSquares(update.step, tuple(chain.from_iterable(each[1] for each in measured)))
        ]
        for held, _, flags_of in measured:
            told += self.closing.updated(self._states[held.slice], held, flags_of)
        return told

    # Values.
    def _on_value_arrived(self, event: ValueArrived) -> Sequence[Any]:
        rank, slice_, step, priority = event
        state = self._state(slice_)
        if rank != SERVER:
            check_giver(self._peers, rank)
        if step and self.closing.may_be_apart:
            return []  # the shell compares them
        state.take_values(step, state.collecting)
        if step:
            return []
        state.priority = priority
        others = tuple(sorted(self._members.of_step(0) - {rank}))
        told: list[Any] = [InstallValue(slice_), AnswerSlice(slice_, 0, priority, others)]
        if self.closing.passes_on and rank != SERVER:
            told.append(MessageReady(SERVER, Kind.VALUE, 0, priority, slice_, NO_TOKEN))
        return self._go_on(told)

    # A lost server's slices (`core.takeover`).
    def _on_slices_settled(self, event: SlicesSettled) -> Sequence[Any]:
        for piece in event.pieces:
            number = piece.number
            if number not in self._slices:
                self._slices[number] = piece
                self._states[number] = _state_of(number, self._names[piece.parameter])
                self.closing.begin(self._states[number])
            self._states[number].done = event.rounds[number]
        return []

    def _on_pull_arrived(self, event: PullArrived) -> Sequence[Any]:
        state = self._state(event.slice)
        self._members.check_rank(event.rank)
        return self._go_on(self.closing.pull(state, event))

    # Frames.
    def _on_frame_sent(self, event: FrameSent) -> Sequence[Any]:
        followed = self._replies.lanes.sent(event.peer)
        return [*followed, *self._end()] if event.peer == SERVER else followed

    def _on_message_ready(self, event: MessageReady) -> Sequence[Any]:
        self._replies.send(event)
        return self._replies.lanes.depart()


def _state_of(number: int, name: str) -> SliceState:
    what, use = f"slice {number} of {name}", f"pushed a slice of {name}"
    return SliceState(number, name, what=what, use=use)
