"""The server's side of the protocol as a state machine (P3Server, P3 section 4.2).

Theory of operation. A slice's pushes are collected, closed, held at the barrier if there is one,
combined and answered. The *closing rule* decides which pushes close a round of a slice, and whom
the server then answers (`core.closing`). A closed round enters the update queue; one update is
under way at a time, the most urgent first. The shell sums the gradients in rank order, whatever
order they came in, so the bits never depend on timing. Answers leave at once, with the priority
that the pushes carried, through a send queue for each peer (`core.sendqueue`). If updates need the
norm of all gradients, sum and update are two operations, with a ``barrier`` between them
(`core.barrier`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from types import MappingProxyType
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

    ``index`` is the server's own, and ``names`` are the parameters', for messages. So many
    ``workers`` push to it, who are its ``peers`` and take ``turns``. ``closing`` makes the rule;
    ``shards`` are what the rule closes beside slices (`core.rows_machine`).
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
        shards: States = MappingProxyType({}),
    ) -> None:
        self._index = index
        self._peers = peers or each_worker(workers)
        self._slices = {piece.number: piece for piece in slices if piece.server == index}
        self._names = names
        self._states = {
            number: _state_of(number, names[piece.parameter])
            for number, piece in self._slices.items()
        }
        self._states.update(shards)
        self.closing = closing(self._states, self._peers)
        self._members = self.closing.members
        self._barrier = barrier
        self._held = HeldSums(barrier)
        self._updates: SendQueue[UpdateSlice | SumSlice] = SendQueue(order)
        self._updating: UpdateSlice | SumSlice | None = None
        self._measured: dict[int, tuple[UpdateSlice, tuple[SquareSum, ...], int]] = {}
        """The slices that are averaged, until all of the round are; last the answer's flags."""
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
        return self._follow(of_rule(event))

    # Read-only views.
    def owned(self, slice_: int) -> Slice:
        """The slice, if it is this server's; raises `RemoteProtocolError` otherwise."""
        piece = self._slices.get(slice_)
        if piece is None:
            raise self._foreign(slice_)
        return piece

    def _state(self, slice_: int) -> SliceState:
        state = self._states.get(slice_)
        if state is None:
            raise self._foreign(slice_)
        return state

    def _foreign(self, slice_: int) -> RemoteProtocolError:
        return RemoteProtocolError(f"slice {slice_} does not belong to server {self._index}")

    @property
    def queue_depth(self) -> int:
        return len(self._replies.lanes)

    @property
    def sending_to(self) -> set[int]:
        return {frame.peer for frame in self._replies.lanes.items()}

    def has_sent_all(self, rank: int) -> bool:
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
            return f"{name} is summed and waits for {self._held.describe(slice_, others)}"
        return f"{name} is queued for its update, with {len(self._updates) - 1} other slices"

    def priorities(self) -> list[tuple[int, int]]:
        """The priority that each slice was pushed with last."""
        return [(number, self._states[number].priority) for number in self._slices]

    def incomplete(self) -> list[tuple[int, int]]:
        return self.closing.incomplete()

    def awaited(self) -> set[int]:
        """The members that some slice waits for, and once any has left, all that have not."""
        found: set[int] = set()
        for slice_, step in self.incomplete():
            found.update(self.closing.missing(self._states[slice_], step))
        return found | (self._members.here - self._members.left if self._members.left else set())

    def can_spare(self, rank: int) -> bool:
        return self.closing.can_spare(rank)

    # Collecting and closing.
    def _on_push_arrived(self, event: PushArrived) -> Sequence[Any]:
        state = self._states.get(event.slice) or self._state(event.slice)
        return self._follow(self.closing.add(state, event))

    def _follow(self, instructions: Sequence[Any]) -> Sequence[Any]:
        """Do what a rule says: closed rounds queue for their updates, and answers for their peers.

        Returns what is left for the shell.
        """
        followed: list[Any] = []
        for each in instructions:
            kind = type(each)
            if kind is UpdateSlice:
                slice_, step, ranks = each[:3]
                needs_norm = self._barrier is not None and not each.gradient
                if needs_norm and not ranks:
                    followed += self._held.hold(slice_, step, ranks, each.counted, ZERO)
                    continue
                due = SumSlice(slice_, step, ranks, each.counted) if needs_norm else each
                followed += self._queue(due)
            elif kind is AnswerSlice:
                followed += self._answer(each)
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
        return self._follow(self.closing.leave(event.rank)) or self._end()

    def _end(self) -> list[Finish]:
        """The end, if all have said goodbye, and all that is passed on has left."""
        is_under_way = self.closing.passes_on and (self._updating or self._updates.heap)
        is_ended = self._members.all_left and not is_under_way and self.has_sent_all(SERVER)
        return [Finish()] if is_ended else []

    # The barrier.
    def _on_slice_summed(self, event: SliceSummed) -> Sequence[Any]:
        summed, self._updating = self._updating, None
        if not isinstance(summed, SumSlice):
            raise InternalError("a sum is done that nobody started")
        return [*self._held.hold(*summed, event.part), *self._next_update()]

    def _on_norm_arrived(self, event: NormArrived) -> Sequence[Any]:
        if self._barrier is None or not self._barrier.takes(event.rank):
            raise RemoteProtocolError(
                f"{self._peers.name(event.rank)} sent the norm of step {event.step}, which is not"
                " awaited"
            )
        if self._barrier.has_been_told(event.step):
            return []
        whose = self._barrier.whose(event.rank)
        self._barrier.release(event.step, whose)
        released = self._held.release(whose, skip=event.skip)
        followed: list[Any] = []
        for slice_, held in sorted(released, key=lambda each: self._states[each[0]].priority):
            ranks, counted = held
            followed += self._queue(UpdateSlice(slice_, event.step, ranks, counted=counted))
        return followed

    # Updating, and answering.
    def _queue(self, due: UpdateSlice | SumSlice) -> Sequence[Any]:
        self._updates.push(due.step, self._states[due.slice].priority, due)
        return self._next_update()

    def _answer(self, answer: AnswerSlice) -> Sequence[Any]:
        if self.closing.binds:
            return [answer]
        self._replies.answer(answer)
        return []

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
            instructions = self._note_squares(update, event.squares, flags)
        else:
            instructions = self.closing.updated(state, update, flags)
        return [*self._follow(instructions), *self._next_update()]

    def _note_squares(
        self, update: UpdateSlice, squares: tuple[SquareSum, ...], flags: int
    ) -> Sequence[Any]:
        """Answer all slices of a round when the last one's squares are known.

        Until then no average goes back: workers cannot use any before they know the norm, and on
        a shared link averages would hold up gradients, and so the norm.
        """
        self._measured[update.slice] = (update, squares, flags)
        if len(self._measured) < len(self._slices):
            return []
        measured = [self._measured[slice_] for slice_ in sorted(self._slices)]
        self._measured.clear()
        instructions: list[Any] = [
            SendSquares(update.step, tuple(chain.from_iterable(each[1] for each in measured)))
        ]
        for averaged, _, answer_flags in measured:
            state = self._states[averaged.slice]
            instructions += self.closing.updated(state, averaged, answer_flags)
        return instructions

    # Values.
    def _on_value_arrived(self, event: ValueArrived) -> Sequence[Any]:
        rank, slice_, step, priority = event
        state = self._state(slice_)
        if rank != SERVER:
            check_giver(self._peers, rank)
        if step and self.closing.steps_may_differ:
            return []  # the shell compares them
        state.take_values(step, state.collecting)
        if step:
            return []
        state.priority = priority
        others = tuple(sorted(self._members.of_step(0) - {rank}))
        instructions: list[Any] = [InstallValue(slice_), AnswerSlice(slice_, 0, priority, others)]
        if self.closing.passes_on and rank != SERVER:
            instructions.append(MessageReady(SERVER, Kind.VALUE, 0, priority, slice_, NO_TOKEN))
        return self._follow(instructions)

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
        return self._follow(self.closing.pull(state, event))

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
