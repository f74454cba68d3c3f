"""Row-wise parameters: who holds which rows, and a server's part as a state machine.

Theory of operation (Parallax, sections 2.2 and 5). Of an embedding's table a step touches few
rows. So every server holds a shard of the rows; a worker pulls the rows of its batch before it
looks them up, and pushes row numbers with those rows' gradients. When every worker has pushed, the
server adds the gradients up in rank order and updates the touched rows. Nothing is sent back by
itself: the next batch needs other rows. A pull names the step after which it wants the rows, so it
may come early, and waits on the server until that step's update is done. If updates need the norm
of all gradients, sum and update are two operations, with a ``barrier`` between them that the shards
share with the server's slices (`core.barrier`).

Of a remote table (one that no worker has) nobody sends the values: each server makes its rows, and
may be asked for them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from foreprop.core.barrier import HeldSums, StepBarrier
from foreprop.core.closing import AllMembers, unlike_values
from foreprop.core.collect import NEVER, SliceState, check_giver, with_gradient
from foreprop.core.frames import (
    FailSession,
    InstallValue,
    NormArrived,
    PeerLeft,
    Peers,
    PullArrived,
    PushArrived,
    SendNormPart,
    ValueArrived,
)
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.shards import Shard
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


class UpdateRows(NamedTuple):
    shard: int
    step: int
    ranks: tuple[int, ...]
    """The ranks that had a gradient, ascending. Empty: no update."""


class AnswerRows(NamedTuple):
    """Copy the wanted rows now: the next update may come before they are sent."""

    rank: int
    shard: int
    step: int
    request: int
    priority: int


RowsInstruction = UpdateRows | SumRows | SendNormPart | InstallValue | AnswerRows | FailSession


class RowsMachine:
    """Decides when a server updates a shard and when it answers pulls. Not thread-safe.

    ``names`` are the parameters' names, for messages; ``index`` is the server's own; ``peers`` push
    to it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        index: int,
        peers: Peers,
        names: Sequence[str],
        barrier: StepBarrier | None = None,
    ) -> None:
        self._index = index
        self._peers = peers
        self._states = {
            shard.number: _state_of(shard, names[shard.parameter])
            for shard in shards
            if shard.server == index
        }
        self._pulls: dict[int, list[PullArrived]] = {number: [] for number in self._states}
        """By shard, those that wait for their step."""
        self._closing = AllMembers(self._states, peers, ahead=True)
        self._needs_norm = barrier is not None
        self._summing: dict[int, tuple[int, ...]] = {}  # by shard, whose gradients
        self._held = HeldSums(barrier, "shard")
        self._handlers: dict[type, Callable[[Any], Sequence[RowsInstruction]]] = {
            PushArrived: self._on_push_arrived,
            ValueArrived: self._on_value_arrived,
            PullArrived: self._on_pull_arrived,
            RowsSummed: self._on_rows_summed,
            NormArrived: self._on_norm_arrived,
            RowsUpdated: self._on_rows_updated,
            PeerLeft: lambda event: self._closing.leave(event.rank),
        }

    def handle(self, event: Any) -> Sequence[RowsInstruction]:
        """The only way state changes; `RemoteProtocolError` leaves the state as it was."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InternalError(f"a server of rows does not know the event {event!r}")
        return handler(event)

    # Read-only views.
    def incomplete(self) -> list[tuple[int, int]]:
        """Shards that some but not all workers have pushed: (shard, step)."""
        return self._closing.incomplete()

    def describe_wait(self, shard: int, step: int) -> str:
        """What a shard waits for at this step, in words."""
        state = self._state(shard)
        name = state.name
        if state.done_step >= step:
            return f"the rows of {name} are updated"
        if state.updating == step:
            if shard in self._held:
                others = (self.describe_wait(*each) for each in self.incomplete())
                wait = self._held.describe(others)
                return f"the rows of {name} are summed and wait for {wait}"
            return f"the rows of {name} are being updated"
        missing = self._peers.names(self._closing.missing(state, step))
        return f"the rows of {name} wait for the push of {missing}"

    # Handlers.
    def _on_push_arrived(self, event: PushArrived) -> Sequence[RowsInstruction]:
        state = self._state(event.slice)
        self._closing.note(state, event)
        return self._next(state)

    def _on_value_arrived(self, event: ValueArrived) -> Sequence[RowsInstruction]:
        rank, shard, step, _ = event
        state = self._state(shard)
        check_giver(self._peers, rank)
        state.take_values(step, state.at(step))
        return [] if step else [InstallValue(shard), *self._answers(state)]

    def _on_pull_arrived(self, event: PullArrived) -> Sequence[RowsInstruction]:
        state = self._state(event.slice)
        self._closing.check_present(event.rank, state)
        if event.step < state.done_step:
            raise RemoteProtocolError(
                f"{self._peers.name(event.rank)} pulled rows of {state.name} as of"
                f" step {event.step}; step {state.done_step} is done"
            )
        self._pulls[event.slice].append(event)
        return self._answers(state)

    def _on_rows_summed(self, event: RowsSummed) -> Sequence[RowsInstruction]:
        ranks = self._summing.pop(event.shard, None)
        if ranks is None:
            raise InternalError("a sum of rows finished that nobody started")
        step = self._state(event.shard).updating
        return self._held.hold(event.shard, step, ranks, event.part)

    def _on_norm_arrived(self, event: NormArrived) -> Sequence[RowsInstruction]:
        released = self._held.release(skip=event.skip)
        return [UpdateRows(shard, event.step, ranks) for shard, ranks in released]

    def _on_rows_updated(self, event: RowsUpdated) -> Sequence[RowsInstruction]:
        state = self._state(event.shard)
        waits = event.shard in self._summing or event.shard in self._held
        if not state.updating or waits:
            raise InternalError("an update of rows finished that nobody started")
        state.done, state.updating = (state.updating, 0), 0
        return [*self._answers(state), *self._next(state)]

    # Shared pieces.
    def _state(self, shard: int) -> SliceState:
        state = self._states.get(shard)
        if state is None:
            raise RemoteProtocolError(f"shard {shard} does not belong to server {self._index}")
        return state

    def _next(self, state: SliceState) -> Sequence[RowsInstruction]:
        """Start the oldest step's update, or sum, if every worker has pushed it; one at a time."""
        if state.updating or not state.rounds:
            return []
        shard, step, pushed = state.number, state.oldest[0], state.rounds[state.oldest]
        if not self._closing.is_full(pushed):
            return self._closing.missing_for_ever(state)
        unlike = unlike_values(self._peers, state, step, pushed)
        if unlike:
            return unlike
        del state.rounds[state.oldest]
        state.updating = step
        ranks = with_gradient(pushed)
        if not self._needs_norm:
            return [UpdateRows(shard, step, ranks)]
        if not ranks:
            return self._held.hold(shard, step, ranks, ZERO)
        self._summing[shard] = ranks
        return [SumRows(shard, step, ranks)]

    def _answers(self, state: SliceState) -> Sequence[RowsInstruction]:
        """Of the pulls that have waited for the step that is done."""
        pulls = self._pulls[state.number]
        due = [pull for pull in pulls if pull.step <= state.done_step]
        self._pulls[state.number] = [pull for pull in pulls if pull.step > state.done_step]
        return [AnswerRows(p.rank, p.slice, p.step, p.request, p.priority) for p in due]


def _state_of(shard: Shard, name: str) -> SliceState:
    """Nobody sends the values of a remote table."""
    what, use = f"rows of {name}", f"used rows of {name}"
    done = (0, 0) if shard.remote else NEVER
    return SliceState(shard.number, name, what=what, use=use, done=done)
