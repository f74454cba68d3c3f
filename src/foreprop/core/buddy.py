"""Buddies: what only one node has, another one keeps as well.

All workers have the values. What a lost server takes with it is the optimizer state of its slices.
So a worker of another node, its buddy, keeps copies in memory, as in double in-memory checkpoints
(Zheng, Shi and Kale, FTC-Charm++, Cluster 2004, section 2).

Theory of operation. Each slice is a unit of its own: its state after step s, a *snapshot*, is
copied every K steps when s has been updated, the slices in turn. A snapshot leaves when no other
frame of the server is queued or under way, one at a time. The buddy says what it holds.

The bound. An answer of step s leaves only when the buddy holds the slice's state after step s - K
or a later one; with K = 1, after s itself. Until then it waits, and its snapshot goes at once, as
urgent as the answer. So whatever value a survivor has, the buddy has a state that is at most K
steps older, and with K = 1 the very state. An update whose answer nobody has is undone by the loss;
for that the buddy keeps two snapshots of a slice (`HeldStates`): one is not ahead of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from foreprop.core.collect import AnswerSlice, SliceUpdated
from foreprop.core.frames import (
    LAST_PRIORITY,
    NO_TOKEN,
    FrameSent,
    MessageReady,
    PeerLeft,
    SendFrame,
)
from foreprop.core.membership import PeerDropped
from foreprop.core.slicing import Slice
from foreprop.core.takeover import SliceTakenOver
from foreprop.core.wire import Flag, Kind
from foreprop.errors import RemoteProtocolError

NOBODY = -1
"""In the place of a buddy's number."""
_NOTHING = -(2**62)
"""Held of a slice whose state somebody has replaced."""

Data = TypeVar("Data")


def buddy_of(node: int, members: Collection[int]) -> int:
    """Who keeps a node's snapshots: the next member in ring order, or `NOBODY`."""
    others = sorted(member for member in members if member != node)
    after = [member for member in others if member > node]
    return (after or others or [NOBODY])[0]


def most_lost(every: int) -> int:
    """How many steps older than the values a buddy's states may be, with snapshots that often."""
    return 0 if every == 1 else every


# Events.
class SnapshotHeld(NamedTuple):
    """The buddy has the slice's state after this step."""

    rank: int
    slice: int
    step: int


class StateKept(NamedTuple):
    """The copy that was asked for is made."""

    slice: int
    step: int


class StateReplaced(NamedTuple):
    """The slice has another optimizer state than its updates have made."""

    slice: int


# Instructions.
class KeepState(NamedTuple):
    """Copy the slice's state as it is now, after this step, and say `StateKept`."""

    slice: int
    step: int


class Counted(Protocol):
    """`ServerMachine`, by `core.firstmembers`."""

    def handle(self, event: Any) -> Sequence[Any]: ...
    def owned(self, slice_: int) -> Slice: ...
    def incomplete(self) -> list[tuple[int, int]]: ...
    def awaited(self) -> set[int]: ...
    def can_spare(self, rank: int) -> bool: ...
    def describe_wait(self, slice_: int, step: int) -> str: ...
    def has_sent_all(self, rank: int) -> bool: ...
    def priorities(self) -> list[tuple[int, int]]: ...


class BuddiedServer:
    """A server that counts its members, and whose slices have a buddy. Not thread-safe.

    ``slices`` are the numbers of its own; ``node`` is where it runs, of ``members``, each a node's
    only worker. ``every``: K.
    """

    def __init__(
        self,
        machine: Counted,
        slices: Sequence[int],
        *,
        node: int,
        members: Collection[int],
        every: int,
    ) -> None:
        self._machine = machine
        self._own = list(slices)
        self._node = node
        self._members = set(members)
        self._every = every
        self._most_behind = most_lost(every)
        self.buddy = buddy_of(node, members)
        """Who keeps its snapshots, or `NOBODY`."""
        self.waits = 0
        """How many answers had to wait for the buddy."""
        self._done = dict.fromkeys(self._own, 0)  # the last step that was updated
        self._held = dict.fromkeys(self._own, 0)  # without updates there is no state
        self._next_due: dict[int, int] = {}
        self._plan()
        self._ready: dict[int, int] = {}  # by slice, the step of a snapshot that has not left
        self._waiting: dict[int, AnswerSlice] = {}  # by slice
        self._queued = self._under_way = 0  # frames
        self._unqueued = 0  # answers that were given out and have not become frames
        self._handlers: dict[type, Callable[[Any], Sequence[Any]]] = {
            SliceUpdated: self._on_slice_updated,
            StateKept: self._on_state_kept,
            SnapshotHeld: self._on_snapshot_held,
            StateReplaced: self._on_state_replaced,
            SliceTakenOver: self._on_slice_taken_over,
            PeerDropped: self._on_peer_gone,
            PeerLeft: self._on_peer_gone,
        }
        # what others look at is the machine's own
        self.owned, self.incomplete = machine.owned, machine.incomplete
        self.awaited, self.can_spare = machine.awaited, machine.can_spare
        self.has_sent_all, self.priorities = machine.has_sent_all, machine.priorities

    def _plan(self) -> None:
        """Within its next K steps each slice is due, as many in each."""
        for place, slice_ in enumerate(self._own):
            turn = place * self._every // len(self._own)
            self._next_due[slice_] = self._done[slice_] + 1 + turn

    def handle(self, event: Any) -> Sequence[Any]:
        """The only way state changes; `RemoteProtocolError` leaves the state as it was."""
        handler = self._handlers.get(type(event))
        told = self._pass_on(event) if handler is None else handler(event)
        for each in told:
            if type(each) is AnswerSlice:
                self._unqueued += len(each.ranks)
        return [*told, *self._offer()] if self._ready else told

    # Read-only views.
    def held(self, slice_: int) -> int:
        """After which step the buddy is known to have the slice's state, at least."""
        return max(0, self._held[slice_])

    def describe_wait(self, slice_: int, step: int) -> str:
        """What a slice waits for at this step, in words."""
        waiting = self._waiting.get(slice_)
        if waiting is not None and waiting.step == step:
            return f"slice {slice_} is updated and waits until rank {self.buddy} holds its state"
        return self._machine.describe_wait(slice_, step)

    # Handlers.
    def _pass_on(self, event: Any) -> Sequence[Any]:
        told = self._machine.handle(event)
        if type(event) is MessageReady:
            self._queued += 1
            self._unqueued -= event.kind == Kind.REPLY
        elif type(event) is FrameSent:
            self._under_way -= 1
        for each in told:
            if type(each) is SendFrame:
                self._queued -= 1
                self._under_way += 1
        return told

    def _on_slice_updated(self, event: SliceUpdated) -> Sequence[Any]:
        told = self._pass_on(event)
        answers = [each for each in told if type(each) is AnswerSlice]
        if self.buddy == NOBODY or not answers or answers[0].flags & Flag.UNCHANGED:
            return told
        answer = answers[0]
        slice_, step = answer.slice, answer.step
        self._done[slice_] = step
        kept: list[Any] = []  # the copy is made before the answer leaves, and the next push comes
        if (late := step - self._next_due[slice_]) >= 0:
            self._next_due[slice_] += self._every * (1 + late // self._every)
            kept.append(KeepState(slice_, step))
        if step - self._held[slice_] <= self._most_behind:
            return [*kept, *told]
        self._waiting[slice_] = answer
        self.waits += 1
        others = [each for each in told if each is not answer]
        return [*kept, *self._send_at_once(slice_), *others]

    def _on_state_kept(self, event: StateKept) -> Sequence[Any]:
        if self.buddy == NOBODY:
            return []
        self._ready[event.slice] = event.step
        return self._send_at_once(event.slice) if event.slice in self._waiting else []

    def _on_snapshot_held(self, event: SnapshotHeld) -> Sequence[Any]:
        rank, slice_, step = event
        self._machine.owned(slice_)
        if rank != self.buddy:
            return []  # it was, before
        if step > self._done[slice_]:
            raise RemoteProtocolError(
                f"rank {rank} holds the state of slice {slice_} after step {step}; step"
                f" {self._done[slice_]} is done"
            )
        self._held[slice_] = max(self._held[slice_], step)
        waiting = self._waiting.get(slice_)
        if waiting is None or waiting.step - self._held[slice_] > self._most_behind:
            return []
        return [self._waiting.pop(slice_)]

    def _on_state_replaced(self, event: StateReplaced) -> Sequence[Any]:
        self._machine.owned(event.slice)
        if self.buddy == NOBODY:
            return []
        step = self._done[event.slice]
        self._held[event.slice] = _NOTHING
        return [KeepState(event.slice, step)]

    def _on_slice_taken_over(self, event: SliceTakenOver) -> Sequence[Any]:
        """Of a substitute: as with a new buddy, the slice is held within K steps."""
        told = self._pass_on(event)
        self._done[event.slice] = self._held[event.slice] = event.step
        self._next_due[event.slice] += event.step
        return told

    def _on_peer_gone(self, event: PeerDropped | PeerLeft) -> Sequence[Any]:
        """A buddy that is gone holds nothing.

        What its successor lacks it has within K steps. Until then the bound does not hold.
        """
        told = self._pass_on(event)
        self._members.discard(event.rank)
        if event.rank != self.buddy:
            return told
        self.buddy = buddy_of(self._node, self._members)
        self._ready.clear()
        self._held = dict(self._done)
        self._plan()
        freed = list(self._waiting.values())
        self._waiting.clear()
        return [*freed, *told]

    # Shared pieces.
    def _offer(self) -> Sequence[Any]:
        """A snapshot, if the server has nothing else to send."""
        if self._under_way or self._queued or self._unqueued or not self._ready:
            return []
        return self._send_at_once(next(iter(self._ready)))

    def _send_at_once(self, slice_: int) -> Sequence[Any]:
        """The slice's snapshot, as urgent as the answer that waits for it, if one does."""
        step = self._ready.pop(slice_, None)
        if step is None:
            return []  # it is being made, or on its way
        waiting = self._waiting.get(slice_)
        priority = LAST_PRIORITY if waiting is None else waiting.priority
        frame = MessageReady(self.buddy, Kind.SNAPSHOT, step, priority, slice_, NO_TOKEN)
        return self._pass_on(frame)


class HeldStates(Generic[Data]):
    """What a buddy keeps: of each slice the two newest snapshots. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[int, Data]]] = {}

    def put(self, slice_: int, step: int, data: Data) -> None:
        """Keep it; raises `RemoteProtocolError` if a later one is here."""
        kept = self._kept.setdefault(slice_, [])
        if kept and step < kept[-1][0]:
            raise RemoteProtocolError(
                f"a snapshot of slice {slice_} after step {step} came after that of step"
                f" {kept[-1][0]}"
            )
        if kept and step == kept[-1][0]:
            kept.pop()  # another state was loaded meanwhile
        kept.append((step, data))
        del kept[:-2]

    def newest(self, slice_: int, at_most: int) -> tuple[int, Data] | None:
        """The state after this step or, of those before, the last that is here, with its step."""
        for step, data in reversed(self._kept.get(slice_, [])):
            if step <= at_most:
                return step, data
        return None

    def all(self) -> list[tuple[int, int, Data]]:
        """Slice, step and state of all that is held."""
        return [(slice_, *each) for slice_, kept in self._kept.items() for each in kept]
