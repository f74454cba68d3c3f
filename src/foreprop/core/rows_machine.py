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

from foreprop.core.barrier import StepBarrier, TellNormPart
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.peers import Peers, each_worker
from foreprop.core.shards import Shard
from foreprop.core.wire import Flag
from foreprop.errors import InternalError, RemoteProtocolError


# Events.
class RowsPushed(NamedTuple):
    """The last part of one worker's gradient has come."""

    rank: int
    shard: int
    step: int
    flags: int


class RowsValued(NamedTuple):
    """Rank 0 has sent the last part of the shard's values."""

    rank: int
    shard: int
    step: int


class RowsPulled(NamedTuple):
    rank: int
    shard: int
    step: int
    """The rows as they are after this step."""
    request: int
    """A number that the worker knows it by."""
    priority: int


class RowsUpdated(NamedTuple):
    """The update of this shard that was under way is done."""

    shard: int


class RowsSummed(NamedTuple):
    """The sum of this shard that was under way is done; ``part`` is that of its squares."""

    shard: int
    part: SquareSum


class NormKnown(NamedTuple):
    """The barrier has let go of this step."""

    step: int
    skip: bool = False
    """Nothing is to be updated in this step."""


class RankLeft(NamedTuple):
    rank: int


# Instructions.
class UpdateRows(NamedTuple):
    shard: int
    step: int
    ranks: tuple[int, ...]
    """The ranks that had a gradient, ascending. Empty: no update."""


class SumRows(NamedTuple):
    """Add up the gradients, and keep the sum for the update."""

    shard: int
    step: int
    ranks: tuple[int, ...]


class InstallRows(NamedTuple):
    """Take the received values (start of the session)."""

    shard: int


class AnswerRows(NamedTuple):
    """Copy the wanted rows now: the next update may come before they are sent."""

    rank: int
    shard: int
    step: int
    request: int
    priority: int


class FailRows(NamedTuple):
    reason: str
    rank: int
    """Who is to blame, or -1."""
    step: int


RowsInstruction = UpdateRows | SumRows | TellNormPart | InstallRows | AnswerRows | FailRows


class _ShardState:
    __slots__ = ("collected", "done_step", "pulls", "updating", "valued_step")

    def __init__(self, *, remote: bool) -> None:
        self.done_step = 0 if remote else -1
        self.updating = 0  # the step of the sum or update under way, or 0
        self.collected: dict[int, dict[int, int]] = {}  # by step and rank: the push's flags
        self.pulls: list[RowsPulled] = []  # that wait for their step
        self.valued_step = -1


class RowsMachine:
    """Decides when a server updates a shard and when it answers pulls. Not thread-safe.

    ``names`` are the parameters' names, for messages; ``index`` is the server's own. ``workers`` is
    how many push to it, and ``peers`` who they are.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        index: int,
        workers: int,
        names: Sequence[str],
        barrier: StepBarrier | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._index = index
        self._workers = workers
        self._peers = peers or each_worker(workers)
        self._names = {shard.number: names[shard.parameter] for shard in shards}
        self._states = {
            shard.number: _ShardState(remote=shard.remote)
            for shard in shards
            if shard.server == index
        }
        self._barrier = barrier
        self._summing: dict[int, tuple[int, ...]] = {}  # by shard, whose gradients
        self._held: dict[int, tuple[int, ...]] = {}  # likewise, of those at the barrier
        self._left: set[int] = set()
        self._handlers: dict[type, Callable[[Any], list[RowsInstruction]]] = {
            RowsPushed: self._on_pushed,
            RowsValued: self._on_valued,
            RowsPulled: self._on_pulled,
            RowsSummed: self._on_summed,
            NormKnown: self._on_norm_known,
            RowsUpdated: self._on_updated,
            RankLeft: self._on_left,
        }

    def handle(self, event: Any) -> list[RowsInstruction]:
        """The only way state changes; `RemoteProtocolError` leaves the state as it was."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InternalError(f"a server of rows does not know the event {event!r}")
        return handler(event)

    # Read-only views.
    def incomplete(self) -> list[tuple[int, int]]:
        """Shards that some but not all workers have pushed: (shard, step)."""
        return [(n, min(s.collected)) for n, s in self._states.items() if s.collected]

    def describe_wait(self, shard: int, step: int) -> str:
        """What a shard waits for at this step, in words."""
        state, name = self._state(shard), self._names[shard]
        if state.done_step >= step:
            return f"the rows of {name} are updated"
        if state.updating == step:
            if shard in self._held:
                return f"the rows of {name} are summed and wait for {self._describe_barrier()}"
            return f"the rows of {name} are being updated"
        missing = self._peers.names(self._missing(state, step))
        return f"the rows of {name} wait for the push of {missing}"

    def _describe_barrier(self) -> str:
        text = self._barrier.describe() if self._barrier is not None else ""
        for shard, step in self.incomplete():
            return f"{text}; {self.describe_wait(shard, step)}"
        return text

    # Handlers.
    def _on_pushed(self, event: RowsPushed) -> list[RowsInstruction]:
        rank, shard, step, flags = event
        state = self._state(shard)
        self._check_rank(rank, shard)
        if step <= max(state.done_step, 0) or step == state.updating:
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pushed rows of {self._names[shard]} for step {step},"
                f" which is past: step {state.done_step} is done"
            )
        pushed = state.collected.get(step, {})
        if rank in pushed:
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pushed rows of {self._names[shard]} twice in step {step}"
            )
        state.collected.setdefault(step, pushed)[rank] = flags
        return self._next(shard, state)

    def _on_valued(self, event: RowsValued) -> list[RowsInstruction]:
        rank, shard, step = event
        state = self._state(shard)
        if self._peers.first_rank(rank) != 0:
            who = self._peers.name(rank)
            raise RemoteProtocolError(f"{who} sent parameter values; only rank 0 may")
        if step <= max(state.done_step, state.valued_step) or 0 in state.collected.get(step, {}):
            raise RemoteProtocolError(
                f"values for the rows of {self._names[shard]} came for step {step}: twice or late"
            )
        state.valued_step = step
        if step > 0:
            return []
        state.done_step = 0
        return [InstallRows(shard), *self._answers(state)]

    def _on_pulled(self, event: RowsPulled) -> list[RowsInstruction]:
        state = self._state(event.shard)
        self._check_rank(event.rank, event.shard)
        if event.step < state.done_step:
            raise RemoteProtocolError(
                f"{self._peers.name(event.rank)} pulled rows of {self._names[event.shard]} as of"
                f" step {event.step}; step {state.done_step} is done"
            )
        if event.step == state.done_step:
            return [AnswerRows(*_answer(event))]
        state.pulls.append(event)
        return []

    def _on_summed(self, event: RowsSummed) -> list[RowsInstruction]:
        ranks = self._summing.pop(event.shard, None)
        if ranks is None:
            raise InternalError("a sum of rows finished that nobody started")
        return self._hold(event.shard, ranks, event.part)

    def _hold(self, shard: int, ranks: tuple[int, ...], part: SquareSum) -> list[RowsInstruction]:
        """At the barrier until the step's norm is known."""
        if self._barrier is None:
            raise InternalError(f"shard {shard} was summed, but no norm is needed")
        told = self._barrier.hold(self._state(shard).updating, shard, part)
        self._held[shard] = ranks
        return list(told)

    def _on_norm_known(self, event: NormKnown) -> list[RowsInstruction]:
        held, self._held = self._held, {}
        updates: list[RowsInstruction] = [
            UpdateRows(shard, event.step, () if event.skip else ranks)
            for shard, ranks in held.items()
        ]
        return updates

    def _on_updated(self, event: RowsUpdated) -> list[RowsInstruction]:
        state = self._state(event.shard)
        waits = event.shard in self._summing or event.shard in self._held
        if not state.updating or waits:
            raise InternalError("an update of rows finished that nobody started")
        state.done_step, state.updating = state.updating, 0
        return [*self._answers(state), *self._next(event.shard, state)]

    def _on_left(self, event: RankLeft) -> list[RowsInstruction]:
        self._left.add(event.rank)
        for shard, state in self._states.items():
            if state.collected and (failure := self._never(shard, state, min(state.collected))):
                return [failure]
        return []

    # Shared pieces.
    def _state(self, shard: int) -> _ShardState:
        state = self._states.get(shard)
        if state is None:
            raise RemoteProtocolError(f"shard {shard} does not belong to server {self._index}")
        return state

    def _check_rank(self, rank: int, shard: int) -> None:
        if not 0 <= rank < self._workers:
            raise RemoteProtocolError(f"rank {rank} of a world of {self._workers}")
        if rank in self._left:
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} used rows of {self._names[shard]} after its goodbye"
            )

    def _missing(self, state: _ShardState, step: int) -> list[int]:
        pushed = state.collected.get(step, {})
        return [rank for rank in range(self._workers) if rank not in pushed]

    def _next(self, shard: int, state: _ShardState) -> list[RowsInstruction]:
        """Start the oldest step's update, or sum, if every worker has pushed it; one at a time."""
        if state.updating or not state.collected:
            return []
        step = min(state.collected)
        pushed = state.collected[step]
        if len(pushed) < self._workers:
            failure = self._never(shard, state, step)
            return [failure] if failure else []
        changed = sorted(rank for rank, flags in pushed.items() if flags & Flag.VALUE_CHANGED)
        if 0 < len(changed) < self._workers:
            rest = self._peers.listed(sorted(pushed.keys() - set(changed)))
            reason = (
                f"parameter {self._names[shard]} was changed by hand before step {step} on"
                f" {self._peers.listed(changed)} but not on {rest}: change it on every rank alike"
            )
            return [FailRows(reason, -1, step)]
        del state.collected[step]
        state.updating = step
        ranks = tuple(sorted(r for r, flags in pushed.items() if not flags & Flag.NO_GRADIENT))
        if self._barrier is None:
            return [UpdateRows(shard, step, ranks)]
        if not ranks:
            return self._hold(shard, ranks, ZERO)
        self._summing[shard] = ranks
        return [SumRows(shard, step, ranks)]

    def _never(self, shard: int, state: _ShardState, step: int) -> FailRows | None:
        """Whether somebody will never push what the others have pushed."""
        for rank in self._missing(state, step):
            ahead = [later for later, pushed in state.collected.items() if rank in pushed]
            if rank not in self._left and not ahead:
                continue
            where = "has left the session" if rank in self._left else f"is at step {min(ahead)}"
            others = self._peers.listed(sorted(state.collected[step]))
            reason = (
                f"{self._peers.name(rank)} {where}, but {others} are at step {step} and need its"
                f" gradient of {self._names[shard]}: all ranks must make the same number of steps"
            )
            return FailRows(reason, rank, step - 1)
        return None

    def _answers(self, state: _ShardState) -> list[RowsInstruction]:
        due = [pull for pull in state.pulls if pull.step <= state.done_step]
        state.pulls = [pull for pull in state.pulls if pull.step > state.done_step]
        return [AnswerRows(*_answer(pull)) for pull in due]


def _answer(pull: RowsPulled) -> tuple[int, int, int, int, int]:
    return pull.rank, pull.shard, pull.step, pull.request, pull.priority
