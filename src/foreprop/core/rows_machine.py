"""Rows of tables beside a server's slices: when they are updated, and which worker may read them.

Theory of operation (Parallax, sections 2.2 and 5). A step touches few rows of an embedding's table.
So every server holds a *shard* of the rows; a worker pulls the rows of its batch before it looks
them up, and pushes row numbers with those rows' gradients. To the closing rule a shard is a slice
like others. What differs:

- Nothing is sent back unasked, for the next batch needs other rows. Where a slice's values would be
  sent, the worker *may read*. A pull names the step after which it wants the rows, so it may come
  early; then it waits until the worker may read as of that step.
- A worker that looks nothing up does not wait, and may push its next step before it may read. Such
  a push is *held*: the rule sees a worker's push when the one before is answered, as ever.
- Shards are updated beside the slices, each with one update at a time, the earliest step first.

Nobody sends the values of a remote table, which no worker has: each server makes its rows, and may
be asked for them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foreprop.core.closing import RanksApart
from foreprop.core.collect import (
    NEVER,
    AnswerSlice,
    DropPush,
    SliceState,
    SumSlice,
    UpdateSlice,
)
from foreprop.core.frames import FailSession, PeerLeft, PullArrived, PushArrived, ValueArrived
from foreprop.core.membership import PeerDropped
from foreprop.core.norm import SquareSum
from foreprop.core.server_machine import Rule, ServerMachine
from foreprop.core.slicing import Shard, Slice
from foreprop.core.wire import Flag
from foreprop.errors import InternalError, RemoteProtocolError


# Events that only rows know; the others are in `core.frames`, and their ``slice`` is the shard's.
class RowsSummed(NamedTuple):
    """The sum of this shard that was under way is done; ``part`` is that of its squares."""

    shard: int
    part: SquareSum


class RowsUpdated(NamedTuple):
    """The update of this shard that was under way is done."""

    shard: int


# Instructions, likewise.
class SumRows(NamedTuple):
    """Add up the gradients, and keep the sum for the update."""

    shard: int
    step: int
    ranks: tuple[int, ...]
    counted: tuple[int, ...] | None = None


class UpdateRows(NamedTuple):
    """Update the rows with the gradients of ``ranks``, ascending; without ranks there is none."""

    shard: int
    step: int
    ranks: tuple[int, ...]
    counted: tuple[int, ...] | None = None


class AnswerRows(NamedTuple):
    """Send the wanted rows; copy them now, for the next update may come before they leave."""

    rank: int
    shard: int
    step: int
    request: int
    priority: int
    flags: int = 0


@dataclass(slots=True, eq=False)
class _Shard:
    """One shard: the rule's ``state``, and what only this machine knows."""

    state: SliceState
    doing: UpdateSlice | SumSlice | None = None
    due: list[UpdateSlice | SumSlice] = field(default_factory=list)
    """The closed rounds that wait for the one under way."""
    pulls: list[PullArrived] = field(default_factory=list)
    """The pulls that wait until their worker may read."""
    pushed: dict[int, int] = field(default_factory=dict)  # by rank, the last step
    read: dict[int, int] = field(default_factory=dict)  # by rank, as of which step it may
    unanswered: set[int] = field(default_factory=set)
    """The ranks whose last push that the rule has seen is not answered."""
    held: dict[int, deque[PushArrived]] = field(default_factory=dict)  # by rank, later pushes


class RowsMachine(ServerMachine[Rule]):
    """A server's machine that also has ``shards``; ``about`` is `ServerMachine`'s.

    Answers among the instructions that come together must be followed with the lock held.
    """

    def __init__(self, slices: Sequence[Slice], shards: Sequence[Shard], **about: Any) -> None:
        states = {}
        for shard in shards:
            if shard.server == about["index"]:
                name = about["names"][shard.parameter]
                done = (0, 0) if shard.remote else NEVER  # nobody sends a remote table's values
                what, use = f"rows of {name}", f"used rows of {name}"
                states[shard.number] = SliceState(shard.number, name, what=what, use=use, done=done)
        self._shards = {number: _Shard(state) for number, state in states.items()}
        self._leaving: set[int] = set()
        """The peers that have said goodbye while pushes of theirs are held."""
        super().__init__(slices, shards=states, **about)
        self._handlers |= {
            RowsSummed: self._on_rows_summed,
            RowsUpdated: self._on_rows_updated,
            PeerDropped: self._on_peer_dropped,
        }

    def describe_wait(self, slice_: int, step: int) -> str:
        shard = self._shards.get(slice_)
        if shard is None:
            return super().describe_wait(slice_, step)
        state, rows = shard.state, f"the rows of {shard.state.name}"
        if state.rounds:
            step = min(step, state.oldest[0])  # what comes after that is held
        if waits := self.closing.describe(state, step):
            return f"the update of {rows} {waits}"
        if state.done_step >= step:
            return f"{rows} are updated"
        if slice_ in self._held:
            others = (self.describe_wait(*each) for each in self.incomplete())
            return f"{rows} are summed and wait for {self._held.describe(slice_, others)}"
        return f"{rows} are being updated"

    # Pushes.
    def _on_push_arrived(self, event: PushArrived) -> Sequence[Any]:
        rank, number, step = event[:3]
        shard = self._shards.get(number)
        if shard is None:
            return super()._on_push_arrived(event)
        self._check_present(rank, shard, f"pushed rows of {shard.state.name}")
        if step <= (last := shard.pushed.get(rank, 0)):
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pushed rows of {shard.state.name} for step {step} after"
                f" step {last}"
            )
        if rank in shard.unanswered:
            shard.held.setdefault(rank, deque()).append(event)
            instructions: Sequence[Any] = []
        else:
            instructions = self._show(shard, event)
        shard.pushed[rank] = step
        return instructions

    def _check_present(self, rank: int, shard: _Shard, what: str) -> None:
        self._members.check_rank(rank)
        if rank in self._members.left or rank in self._leaving:
            raise RemoteProtocolError(f"{self._peers.name(rank)} {what} after its goodbye")

    def _show(self, shard: _Shard, push: PushArrived) -> Sequence[Any]:
        """Let the rule see a push."""
        instructions = self.closing.add(shard.state, push)
        if push.rank in self._members.here:
            shard.unanswered.add(push.rank)
        return self._follow(instructions)

    def _show_next(self, shard: _Shard, rank: int) -> Sequence[Any]:
        """Let the rule see the first push that is held of this rank."""
        held = shard.held.get(rank)
        if not held:
            return []
        push = held.popleft()
        try:
            instructions = self._show(shard, push)
        except RanksApart as error:  # no thread that receives from this rank could raise it now
            return [FailSession(str(error), -1, push.step)]
        if rank in self._leaving and not self._holds(rank):
            self._leaving.remove(rank)
            instructions = [*instructions, *self._on_peer_left(PeerLeft(rank))]
        return instructions

    # Peers that go.
    def _holds(self, rank: int) -> bool:
        return any(shard.held.get(rank) for shard in self._shards.values())

    def _on_peer_left(self, event: PeerLeft) -> Sequence[Any]:
        if self._holds(event.rank):
            self._leaving.add(event.rank)
            return []
        return super()._on_peer_left(event)

    def _on_peer_dropped(self, event: PeerDropped) -> Sequence[Any]:
        rank = event.rank
        instructions = self._follow(self.closing.handlers[PeerDropped](event))
        self._leaving.discard(rank)
        dropped: list[DropPush] = []
        for number, shard in self._shards.items():  # the rule has seen none of what is held
            dropped += (DropPush(number, rank, push.step) for push in shard.held.pop(rank, ()))
            shard.pulls = [pull for pull in shard.pulls if pull.rank != rank]
            shard.unanswered.discard(rank)
        return [*instructions, *dropped]

    # Updating.
    def _queue(self, due: UpdateSlice | SumSlice) -> Sequence[Any]:
        shard = self._shards.get(due.slice)
        if shard is None:
            return super()._queue(due)
        shard.due.append(due)
        return self._begin_next(shard)

    def _begin_next(self, shard: _Shard) -> Sequence[SumRows | UpdateRows]:
        if shard.doing is not None or not shard.due:
            return []
        shard.doing = due = min(shard.due, key=lambda each: each.step)
        shard.due.remove(due)
        if isinstance(due, SumSlice):
            return [SumRows(*due)]
        return [UpdateRows(due.slice, due.step, due.ranks, due.counted)]

    def _on_rows_summed(self, event: RowsSummed) -> Sequence[Any]:
        shard = self._shards[event.shard]
        summed, shard.doing = shard.doing, None
        if not isinstance(summed, SumSlice):
            raise InternalError("a sum of rows finished that nobody started")
        return [*self._held.hold(*summed, event.part), *self._begin_next(shard)]

    def _on_rows_updated(self, event: RowsUpdated) -> Sequence[Any]:
        shard = self._shards[event.shard]
        update = shard.doing
        if not isinstance(update, UpdateSlice):
            raise InternalError("an update of rows finished that nobody started")
        instructions = self._follow(self.closing.updated(shard.state, update, 0))
        shard.doing = None
        return [*instructions, *self._answer_pulls(shard), *self._begin_next(shard)]

    # Reading.
    def _on_value_arrived(self, event: ValueArrived) -> Sequence[Any]:
        shard = self._shards.get(event.slice)
        if shard is None:
            return super()._on_value_arrived(event)
        if event.step and self.closing.steps_may_differ:
            raise RemoteProtocolError(
                f"{self._peers.name(event.rank)} sent rows of {shard.state.name} for step"
                f" {event.step}, and workers may be in different steps"
            )
        return [*super()._on_value_arrived(event), *self._answer_pulls(shard)]

    def _on_pull_arrived(self, event: PullArrived) -> Sequence[Any]:
        rank, number, step = event[:3]
        shard = self._shards.get(number)
        if shard is None:
            return super()._on_pull_arrived(event)
        self._check_present(rank, shard, f"used rows of {shard.state.name}")
        if step < (newest := shard.read.get(rank, 0)):
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pulled rows of {shard.state.name} as of step {step};"
                f" step {newest} is done"
            )
        shard.pulls.append(event)
        return self._answer_pulls(shard)

    def _answer(self, answer: AnswerSlice) -> Sequence[Any]:
        shard = self._shards.get(answer.slice)
        if shard is None:
            return super()._answer(answer)
        if not answer.step:  # the values that all begin with
            return self._answer_pulls(shard)
        shard.read |= dict.fromkeys(answer.ranks, answer.step)
        shard.unanswered.difference_update(answer.ranks)
        instructions: list[Any] = [*self._answer_pulls(shard)]
        for rank in answer.ranks:
            instructions += self._show_next(shard, rank)
        return instructions

    def _answer_pulls(self, shard: _Shard) -> Sequence[AnswerRows]:
        """Answer the workers that may read: between two updates, never within one."""
        if isinstance(shard.doing, UpdateSlice):
            return []
        answered, waiting = list[AnswerRows](), list[PullArrived]()
        for pull in shard.pulls:
            rank, number, step, priority, request = pull
            if shard.state.done == NEVER or step > shard.read.get(rank, 0):
                waiting.append(pull)
                continue
            is_late = self.closing.steps_may_differ and shard.state.done_step > step
            flags = int(Flag.LATE) if is_late else 0
            answered.append(AnswerRows(rank, number, step, request, priority, flags))
        shard.pulls = waiting
        return answered
