"""A server that closes a slice with the pushes that count: of all members, or of the first N - b.

Theory of operation. `core.membership` says what may be closed. The rest is a synchronous server's
(`core.server_machine`): the counted pushes are summed in rank order, one update is under way at a
time, the most urgent first, and whoever has pushed is answered with the new values. Every slice has
one server, which alone decides what it counts, and all workers get its values: so those who go on
have the same bits, whoever has died when, and nobody has to agree on anything.

With backup workers a push may come *late*, when its slice is closed. Then it is dropped, and
answered with the values of now. If those are newer than its step, the worker holds parameters of
two steps: it says `Flag.LATE` with all its pushes of the next one, and they are dropped, too. So a
gradient that counts in step s is always one of exactly the values after step s - 1. Whoever is in
step s exactly has been answered about s - 1 everywhere in time; where a slice of s is closed, N - b
workers are. So enough of them push every slice of s, and no step waits for ever.

Rules: the steps of which a worker pushes a slice increase. At most one step of a slice is open.
What a dropped member still sends is dropped; who comes in its place is `core.newcomers`'. Values
come from rank 0: at the start, and without backup workers also later, when they were changed by
hand. With them each worker may ask for the values of now (a pull of step 0), when it is owed no
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foreprop.core.collect import SliceUpdated, UpdateSlice, with_gradient
from foreprop.core.frames import (
    FailSession,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    PeerLeft,
    Peers,
    PullArrived,
    PushArrived,
    SendFrame,
    ValueArrived,
    each_worker,
)
from foreprop.core.membership import (
    AnswerSlice,
    CountedReplay,
    DropPush,
    MemberLeft,
    Members,
    PeerDropped,
    UpdateCounted,
)
from foreprop.core.newcomers import AnswerJoin, JoinAsked, JoinSettled, MemberJoined, Newcomers
from foreprop.core.sendqueue import USUAL_TURNS, Order, SendLanes, SendQueue, Turns
from foreprop.core.slicing import Slice
from foreprop.core.takeover import SliceTakenOver
from foreprop.core.wire import Flag
from foreprop.errors import InternalError, RemoteProtocolError

CountingInstruction = (
    SendFrame
    | UpdateCounted
    | AnswerSlice
    | DropPush
    | MemberLeft
    | AnswerJoin
    | MemberJoined
    | InstallValue
    | FailSession
    | Finish
)
_NO_VALUES = -1


class _Collected:
    """Of one slice."""

    __slots__ = ("closing", "done", "last", "late", "name", "priority", "pushed", "step", "valued")

    def __init__(self, name: str, workers: int) -> None:
        self.name = name
        self.done = _NO_VALUES
        """The last step that is in the values."""
        self.step = 0
        """The one that is open, or being closed."""
        self.pushed: dict[int, int] = {}
        """The flags of its pushes, by rank."""
        self.closing = False
        """Its update is queued or under way."""
        self.late: list[int] = []
        """Who has pushed since."""
        self.priority = 0
        self.valued = False
        """Rank 0 has sent values for the open step."""
        self.last = [0] * workers
        """The last step that was pushed, by rank."""


class CountingServer:
    """Decides what a server updates and answers next. Not thread-safe.

    ``names`` are the parameters', for messages; ``turns`` are the workers'. With a ``replay`` every
    slice waits for all members, and counts whom that says.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        index: int,
        members: Members,
        order: Order,
        names: Sequence[str],
        replay: CountedReplay | None = None,
        turns: Turns = USUAL_TURNS,
    ) -> None:
        self._index = index
        self._members = members
        self._peers: Peers = each_worker(members.workers)
        self._replay = replay
        self._slices = {piece.number: piece for piece in slices if piece.server == index}
        self._collected = {
            number: _Collected(names[piece.parameter], members.workers)
            for number, piece in self._slices.items()
        }
        self._newcomers = Newcomers(members, self._collected)
        self._updates: SendQueue[UpdateCounted] = SendQueue(order)
        self._updating: UpdateCounted | None = None
        self._lanes: SendLanes[SendFrame] = SendLanes(order, turns=turns)
        self._handlers: dict[type, Callable[[Any], Sequence[CountingInstruction]]] = {
            PushArrived: self._on_push_arrived,
            ValueArrived: self._on_value_arrived,
            PullArrived: self._on_pull_arrived,
            SliceUpdated: self._on_slice_updated,
            MessageReady: self._on_message_ready,
            FrameSent: self._on_frame_sent,
            PeerLeft: self._on_peer_left,
            PeerDropped: self._on_peer_dropped,
            SliceTakenOver: self._on_slice_taken_over,
            JoinAsked: self._on_join_asked,
            JoinSettled: self._on_join_settled,
        }

    def handle(self, event: Any) -> Sequence[CountingInstruction]:
        """The only way state changes; `RemoteProtocolError` leaves the state as it was."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InternalError(f"a server that counts does not know the event {event!r}")
        return handler(event)

    # Read-only views.
    def owned(self, slice_: int) -> Slice:
        """The slice, if it is this server's; raises `RemoteProtocolError` otherwise."""
        self._of(slice_)
        return self._slices[slice_]

    def incomplete(self) -> list[tuple[int, int]]:
        """Slices that some but not all members have pushed, and that wait: (slice, step)."""
        return [
            (number, each.step)
            for number, each in self._collected.items()
            if each.pushed and not each.closing
        ]

    def awaited(self) -> set[int]:
        """The members that some slice waits for, or that stay when others have left."""
        found: set[int] = set()
        for number, _ in self.incomplete():
            found |= self._missing(self._collected[number])
        return found | (self._members.here - self._members.left if self._members.left else set())

    def can_spare(self, rank: int) -> bool:
        """Whether the session can go on without this member."""
        begun = all(each.done != _NO_VALUES for each in self._collected.values())
        rest = self._members.here - self._newcomers.empty_handed - {rank}
        return (begun or rank != 0) and bool(rest)

    def has_sent_all(self, rank: int) -> bool:
        """Whether nothing for this peer is queued or under way."""
        return self._lanes.is_idle(rank)

    def priorities(self) -> list[tuple[int, int]]:
        """By slice, as it was pushed last."""
        return [(number, each.priority) for number, each in self._collected.items()]

    def describe_wait(self, slice_: int, step: int) -> str:
        """What a slice waits for at this step, in words."""
        each = self._of(slice_)
        if each.done >= step:
            return f"{each.name} is updated"
        if each.step == step and each.closing:
            return f"{each.name} is queued for its update, with {len(self._updates)} others"
        missing = self._members.of_step(step) - (each.pushed.keys() if each.step == step else set())
        return f"{each.name} waits for the push of {self._peers.names(sorted(missing))}"

    def _of(self, slice_: int) -> _Collected:
        each = self._collected.get(slice_)
        if each is None:
            raise RemoteProtocolError(f"slice {slice_} does not belong to server {self._index}")
        return each

    def _missing(self, each: _Collected) -> set[int]:
        return self._members.of_step(each.step) - each.pushed.keys()

    # Pushes.
    def _on_push_arrived(self, event: PushArrived) -> Sequence[CountingInstruction]:
        rank, slice_, step, priority, flags = event
        each = self._of(slice_)
        self._members.check_rank(rank)
        dropped = DropPush(slice_, rank)
        if rank not in self._members.here:
            return [dropped]
        self._check(event, each)
        each.last[rank] = step
        if step <= each.done:
            return [dropped, AnswerSlice(slice_, step, priority, (rank,))]
        if each.closing:
            each.late.append(rank)
            return [dropped]
        if unfit := self._maybe_unfit(event, each.name):
            return [unfit]
        each.priority = min(priority, each.priority) if each.pushed else priority
        each.step = step
        each.pushed[rank] = flags
        return self._close_if_complete(slice_, each)

    def _check(self, event: PushArrived, each: _Collected) -> None:
        rank, slice_, step = event[:3]
        what = f"rank {rank} pushed slice {slice_} of {each.name} for step {step}"
        if rank in self._members.left:
            raise RemoteProtocolError(f"{what} after its goodbye")
        if step <= each.last[rank]:
            raise RemoteProtocolError(f"{what} after step {each.last[rank]}")
        if step > each.done and each.pushed and step != each.step:
            raise RemoteProtocolError(f"{what} while step {each.step} is open")

    def _maybe_unfit(self, event: PushArrived, name: str) -> FailSession | None:
        """Of a push that has no meaning where not all are counted."""
        rank, _, step, _, flags = event
        if flags & Flag.GRADIENT:
            why = "the average gradient is asked for by rank {}: leave it to the servers"
        elif flags & Flag.VALUE_CHANGED and self._members.backups:
            why = "it was changed by hand on rank {}: change parameters before parallelize()"
        elif flags & Flag.VALUE_CHANGED and 0 not in self._members.here:
            why = "it was changed by hand on rank {}, and rank 0, whose values count, has left"
        else:
            return None
        return FailSession(f"{name}, step {step}: {why.format(rank)}", -1, step)

    def _close_if_complete(self, slice_: int, each: _Collected) -> Sequence[CountingInstruction]:
        on_time = tuple(r for r in sorted(each.pushed) if not each.pushed[r] & Flag.LATE)
        missing = self._missing(each)
        may_close = not missing if self._replay else self._members.may_close(len(on_time), missing)
        if not may_close:
            return self._stuck(each, missing)
        if unlike := self._maybe_unlike(each):
            return [unlike]
        counted = self._replay.at(slice_, each.step) if self._replay else on_time
        flags = {rank: each.pushed[rank] for rank in counted if rank in each.pushed}
        dropped = [DropPush(slice_, rank) for rank in each.pushed if rank not in flags]
        each.closing = True
        update = UpdateSlice(slice_, each.step, with_gradient(flags))
        self._updates.push(each.step, each.priority, UpdateCounted(update, tuple(flags)))
        return [*dropped, *self._next_update()]

    def _maybe_unlike(self, each: _Collected) -> FailSession | None:
        changed = sorted(r for r, flags in each.pushed.items() if flags & Flag.VALUE_CHANGED)
        if len(changed) in (0, len(each.pushed)):
            return None
        rest = sorted(each.pushed.keys() - set(changed))
        return FailSession(
            f"parameter {each.name} was changed by hand before step {each.step} on"
            f" {self._peers.listed(changed)} but not on {self._peers.listed(rest)}: change it on"
            " every rank alike",
            -1,
            each.step,
        )

    def _stuck(self, each: _Collected, missing: set[int]) -> Sequence[FailSession]:
        """Fail if somebody has left who is still needed."""
        for rank in sorted(missing & self._members.left):
            reason = (
                f"rank {rank} has left the session, but {self._peers.listed(sorted(each.pushed))}"
                f" are at step {each.step} and need its gradient of {each.name}: all ranks must"
                " make the same number of steps"
            )
            return [FailSession(reason, rank, each.step - 1)]
        return []

    def _on_slice_updated(self, _: SliceUpdated) -> Sequence[CountingInstruction]:
        done, self._updating = self._updating, None
        if done is None:
            raise InternalError("an update finished that nobody started")
        slice_, step, ranks = done.update[:3]
        each = self._collected[slice_]
        unchanged = 0 if ranks or each.valued else int(Flag.UNCHANGED)
        early = self._newcomers.updated(slice_, step) if self._members.since else ()
        answered = tuple(sorted({*each.pushed, *each.late, *early} & self._members.here))
        each.done, each.closing, each.valued = step, False, False
        each.pushed.clear()
        each.late.clear()
        answer = AnswerSlice(slice_, step, each.priority, answered, unchanged)
        return [answer, *self._next_update(), *self._newcomers.due()]

    def _next_update(self) -> Sequence[UpdateCounted]:
        if self._updating is not None or not self._updates.heap:
            return []
        self._updating = self._updates.pop()
        return [self._updating]

    # Values.
    def _on_value_arrived(self, event: ValueArrived) -> Sequence[CountingInstruction]:
        rank, slice_, step, priority = event
        each = self._of(slice_)
        if rank != 0:
            raise RemoteProtocolError(f"rank {rank} sent values; only rank 0 may")
        if step > 0 and self._members.backups:
            return []  # the shell compares them
        if step <= each.done or each.valued or 0 in each.pushed:
            raise RemoteProtocolError(f"values for slice {slice_} came twice or late")
        if step > 0:
            each.valued = True
            return []
        each.done, each.priority = 0, priority
        others = tuple(sorted(self._members.of_step(0) - {0}))
        return [InstallValue(slice_), AnswerSlice(slice_, 0, priority, others)]

    def _on_slice_taken_over(self, event: SliceTakenOver) -> Sequence[CountingInstruction]:
        """On a substitute (`core.takeover`). Pushes of the step after it may be here already."""
        slice_, step, priority, owed = event
        each = self._of(slice_)
        if each.done != _NO_VALUES:
            raise RemoteProtocolError(f"slice {slice_} is taken over twice")
        each.done = step
        return [InstallValue(slice_), AnswerSlice(slice_, step, priority, owed)]

    def _on_pull_arrived(self, event: PullArrived) -> Sequence[CountingInstruction]:
        rank, slice_, step, priority, _ = event
        each = self._of(slice_)
        self._members.check_rank(rank)
        owed = rank in each.pushed or rank in each.late or each.done == _NO_VALUES
        if step or owed or not self._members.backups:
            raise RemoteProtocolError(f"rank {rank} pulled slice {slice_} of step {step}")
        return [AnswerSlice(slice_, 0, priority, (rank,))]

    # Frames.
    def _on_message_ready(self, event: MessageReady) -> Sequence[CountingInstruction]:
        peer, kind, step, priority, slice_, token, flags = event
        frame = SendFrame(peer, kind, step, slice_, priority, flags, token)
        self._lanes.push(peer, step, priority, frame)
        return self._lanes.depart()

    def _on_frame_sent(self, event: FrameSent) -> Sequence[CountingInstruction]:
        return self._lanes.sent(event.peer)

    # Who goes.
    def _on_peer_left(self, event: PeerLeft) -> Sequence[CountingInstruction]:
        if event.rank not in self._members.here:
            return []
        self._members.left.add(event.rank)
        for number, _ in self.incomplete():
            each = self._collected[number]
            if stuck := self._stuck(each, self._missing(each)):
                return stuck
        return [Finish()] if self._members.all_left else self._newcomers.due()

    def _on_peer_dropped(self, event: PeerDropped) -> Sequence[CountingInstruction]:
        """What waits for it waits no longer."""
        rank = event.rank
        if rank not in self._members.here:
            return []
        if not self.can_spare(rank):
            raise InternalError(f"rank {rank} was dropped, and cannot be spared")
        followed: list[CountingInstruction] = []
        if not self._newcomers.drop(rank):
            followed.append(self._told_of(rank))
        self._members.drop(rank)
        followed += self._close_all_complete()
        return [*followed, Finish()] if self._members.all_left else followed

    def _told_of(self, rank: int) -> MemberLeft:
        last = [each.last[rank] for each in self._collected.values()]
        step, first = max(last, default=0), self._members.since.get(rank, 1)
        counted = last.count(step) if step >= first else 0
        return MemberLeft(rank, step, counted, len(last))

    def _close_all_complete(self) -> list[CountingInstruction]:
        """Some wait for fewer members now, or newcomers for fewer slices."""
        followed: list[CountingInstruction] = []
        for number, _ in self.incomplete():
            followed += self._close_if_complete(number, self._collected[number])
        return [*followed, *self._newcomers.due()]

    # Who comes.
    def _on_join_asked(self, event: JoinAsked) -> Sequence[CountingInstruction]:
        self._members.check_rank(event.rank)
        answer = self._newcomers.ask(event)
        return [answer, *self._close_all_complete()]  # an earlier promise is forgotten

    def _on_join_settled(self, event: JoinSettled) -> Sequence[CountingInstruction]:
        return [self._newcomers.settle(event), *self._close_all_complete()]
