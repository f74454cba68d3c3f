"""What has been pushed to a server or relay, and who is owed a reply.

Slices, shards of rows and a node's sums are collected alike: see `PushCollector`. Here are also the
events and instructions that only servers know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from foreprop.core.frames import (
    NO_TOKEN,
    FailSession,
    MessageReady,
    Peers,
    PullArrived,
    PushArrived,
    SendFrame,
)
from foreprop.core.norm import SquareSum
from foreprop.core.sendqueue import USUAL_TURNS, Order, Reply, SendLanes, Turns
from foreprop.core.wire import Flag, Kind
from foreprop.errors import RemoteProtocolError


class RanksApart(RemoteProtocolError):
    """A push that does not fit the others', because the ranks' loops have done different things."""


# Events that only servers know.
class SliceUpdated(NamedTuple):
    """The update under way is done."""

    squares: tuple[SquareSum, ...] = ()
    """Of the aggregated gradient by parameter in the slice, if it was to be measured."""


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


# Instructions that only servers get.
class UpdateSlice(NamedTuple):
    slice: int
    step: int
    ranks: tuple[int, ...]
    """The ranks that had a gradient, ascending; the others count as zeros. Empty: no update."""
    gradient: bool = False
    """The workers update: the aggregated gradient is the answer, and the values stay."""
    measure: bool = False
    """Say in `SliceUpdated` what its squares add up to."""


class SumSlice(NamedTuple):
    """Add up the gradients, and keep the sum for the update."""

    slice: int
    step: int
    ranks: tuple[int, ...]


class SendSquares(NamedTuple):
    """Tell every worker the sums of squares of all slices, in the order of their numbers.

    Of a pack there is one for each of its parameters (`core.packs`).
    """

    step: int
    squares: tuple[SquareSum, ...]


# What has been pushed.
Round = tuple[int, int]
"""A step, and which of its rounds."""


NEVER: Round = (-1, 0)


class Pushes:
    """The pushes of one slice or shard that are in.

    ``what`` it is in messages; ``use`` is what nobody may do with it after a goodbye.
    """

    __slots__ = ("done", "name", "rounds", "updating", "use", "what")

    def __init__(self, name: str, *, what: str, use: str, done: Round = NEVER) -> None:
        self.name = name
        self.what = what
        self.use = use
        self.done = done
        self.rounds: dict[Round, dict[int, int]] = {}  # by round and peer: the push's flags
        self.updating = 0  # the step that was taken out to be updated, or 0

    @property
    def done_step(self) -> int:
        return self.done[0]

    @property
    def oldest(self) -> Round:
        """The first round that is being collected, or `NEVER`."""
        return min(self.rounds, default=NEVER)

    @property
    def collecting(self) -> Mapping[int, int]:
        """The flags of the `oldest` round's pushes, by peer."""
        return self.rounds.get(self.oldest, {})

    def at(self, step: int) -> Mapping[int, int]:
        """The flags of the step's pushes, by peer."""
        return next((pushed for (s, _), pushed in self.rounds.items() if s == step), {})


def with_gradient(pushed: Mapping[int, int]) -> tuple[int, ...]:
    """The peers that had a gradient, ascending."""
    having = []
    for peer in sorted(pushed):
        if not pushed[peer] & Flag.NO_GRADIENT:
            having.append(peer)
    return tuple(having)


class PushCollector:
    """Takes the pushes of all slices, or of all shards. Not thread-safe.

    ``ahead``: a peer may push a step before all have pushed the one before.
    """

    def __init__(
        self, all_pushes: Mapping[int, Pushes], peers: Peers, *, ahead: bool = False
    ) -> None:
        self._all = all_pushes
        self._peers = peers
        self._count = peers.count
        self._ahead = ahead
        self._left: set[int] = set()

    @property
    def all_left(self) -> bool:
        return len(self._left) == self._count

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._count:
            raise RemoteProtocolError(f"rank {rank} of a world of {self._count}")

    def check_present(self, rank: int, pushes: Pushes) -> None:
        """Raises `RemoteProtocolError` for somebody unknown, or after the goodbye."""
        self.check_rank(rank)
        if rank in self._left:
            raise self._refused(rank, f"{pushes.use} after its goodbye")

    def check_first(self, rank: int) -> None:
        """Raises `RemoteProtocolError` for values that are not rank 0's."""
        if self._peers.first_rank(rank) != 0:
            raise self._refused(rank, "sent parameter values; only rank 0 may")

    def add(self, push: PushArrived, again: int = 0) -> dict[int, int]:
        """Note a push of the step's round ``again``; returns the flags of all that are in.

        `RemoteProtocolError` leaves everything as it was.
        """
        rank, number, step, _, flags = push
        pushes, at = self._all[number], (step, again)
        if rank in self._left or not 0 <= rank < self._count:
            self.check_present(rank, pushes)
        pushed = pushes.rounds.get(at)
        if pushed is None:
            is_past = at <= pushes.done or step in (0, pushes.updating)
            if is_past or (pushes.rounds and not self._ahead):
                raise self._misplaced(pushes, rank, at)
            pushed = pushes.rounds[at] = {}
        elif rank in pushed:
            raise self._misplaced(pushes, rank, at)
        pushed[rank] = flags
        return pushed

    def _misplaced(self, pushes: Pushes, rank: int, at: Round) -> RemoteProtocolError:
        """What is wrong with a push that does not fit those that are in."""
        here = at if self._ahead or not pushes.rounds else pushes.oldest
        if rank in pushes.rounds.get(here, {}):
            return self._refused(rank, f"pushed {pushes.what} twice in step {here[0]}")
        step = at[0]
        if step in (0, pushes.updating) or at <= pushes.done:
            past = f"which is past: step {pushes.done_step} is done"
            return self._refused(rank, f"pushed {pushes.what} for step {step}, {past}")
        return self._unlike(pushes, rank, at, here)

    def _unlike(self, pushes: Pushes, rank: int, at: Round, here: Round) -> RemoteProtocolError:
        """Of a push that is not for the round that the others are in."""
        (step, again), others = at, self._peers.listed(sorted(pushes.rounds[here]))
        who = self._peers.name(rank)
        if step != here[0]:
            return RanksApart(
                f"{who} pushed {pushes.what} for step {step} while {others} are at step {here[0]}:"
                " all ranks must make the same number of steps. One that catches an error or skips"
                " a batch must do so on every rank alike"
            )
        return RanksApart(
            f"{who} has averaged the gradient of {pushes.name} {again} times before in step {step},"
            f" {others} {here[1]} times: run as many backward passes on every rank, and read"
            " gradients between them on every rank alike"
        )

    def _refused(self, rank: int, why: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self._peers.name(rank)} {why}")

    def is_full(self, pushed: Mapping[int, int]) -> bool:
        return len(pushed) == self._count

    def incomplete(self) -> list[tuple[int, int]]:
        """What some but not all peers have pushed: (number, step)."""
        return [
            (number, pushes.oldest[0])
            for number, pushes in self._all.items()
            if pushes.rounds and not self.is_full(pushes.rounds[pushes.oldest])
        ]

    def missing(self, pushes: Pushes, step: int) -> list[int]:
        """Whose pushes of this step are not in."""
        pushed = pushes.at(step)
        return [peer for peer in range(self._count) if peer not in pushed]

    def split(self, pushed: Mapping[int, int], flag: Flag) -> tuple[str, str] | None:
        """Who has set the flag and who has not, in words; None if all agree."""
        having = sorted(peer for peer, flags in pushed.items() if flags & flag)
        if len(having) in (0, len(pushed)):
            return None
        rest = sorted(pushed.keys() - set(having))
        return self._peers.listed(having), self._peers.listed(rest)

    def unlike_values(self, pushes: Pushes, step: int) -> list[FailSession]:
        """Fail if a full round's parameter was changed by hand on some ranks only."""
        unlike = self.split(pushes.at(step), Flag.VALUE_CHANGED)
        if unlike is None:
            return []
        changed, rest = unlike
        reason = (
            f"parameter {pushes.name} was changed by hand before step {step} on {changed} but"
            f" not on {rest}: change it on every rank alike"
        )
        return [FailSession(reason, -1, step)]

    def leave(self, rank: int) -> list[FailSession]:
        """A peer has said goodbye: fail if somebody needs what it has not pushed."""
        self._left.add(rank)
        failures = (self.missing_for_ever(each) for each in self._all.values())
        return next((failure for failure in failures if failure), [])

    def missing_for_ever(self, pushes: Pushes) -> list[FailSession]:
        """Fail if somebody will never push what the others have pushed."""
        if not self._left and len(pushes.rounds) < 2:
            return []
        step = pushes.oldest[0]
        for peer in self.missing(pushes, step) if pushes.rounds else ():
            ahead = [at for (at, _), pushed in pushes.rounds.items() if peer in pushed]
            if peer not in self._left and not ahead:
                continue
            where = "has left the session" if peer in self._left else f"is at step {min(ahead)}"
            others = self._peers.listed(sorted(pushes.at(step)))
            reason = (
                f"{self._peers.name(peer)} {where}, but {others} are at step {step} and need its"
                f" gradient of {pushes.name}: all ranks must make the same number of steps"
            )
            return [FailSession(reason, peer, step - 1)]
        return []


class Replies:
    """Queues a server's frames and remembers who waits for which slice. Not thread-safe."""

    def __init__(
        self, peers: Peers, *, order: Order, reply: Reply, turns: Turns = USUAL_TURNS
    ) -> None:
        self.lanes: SendLanes[SendFrame] = SendLanes(order, turns=turns)
        self._peers = peers
        self._everybody = range(peers.count)
        self._reply = reply
        self._pulls: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By slice: rank and step of the pulls that came before the update."""
        self._unchanged: dict[int, int] = {}
        """By slice: the flag, if there is no average to be pulled, as no rank had a gradient."""

    def is_pulled(self, slice_: int) -> bool:
        """Whether somebody waits for this slice's next update."""
        return bool(self._pulls.get(slice_))

    def describe(self, slice_: int) -> str:
        """What of an updated slice is still queued, in words."""
        kinds = (Kind.REPLY, Kind.NOTIFY)
        queued = [f for f in self.lanes.items() if f.slice == slice_ and f.kind in kinds]
        if not queued:
            return "no reply is queued"
        return f"replies still queued for {self._peers.listed(sorted(f.peer for f in queued))}"

    def check_pulls(self, event: PullArrived) -> None:
        """Raises `RemoteProtocolError` where nobody needs to ask."""
        if self._reply == "broadcast":
            who = self._peers.name(event.rank)
            raise RemoteProtocolError(f"{who} pulled slice {event.slice}; replies are broadcast")

    def pull(self, event: PullArrived, pushes: Pushes) -> None:
        """Reply, or as soon as the update is done. `RemoteProtocolError` leaves all as it was."""
        rank, slice_, step, priority, _ = event
        if (rank, step) in self._pulls.get(slice_, ()):
            who = self._peers.name(rank)
            raise RemoteProtocolError(f"{who} pulled slice {slice_} twice in step {step}")
        pushed = rank in pushes.at(step)
        if not pushed and step != pushes.done_step:
            raise RemoteProtocolError(
                f"{self._peers.name(rank)} pulled slice {slice_} for step {step}, which it has not"
                f" pushed; step {pushes.done_step} is done"
            )
        if pushed:
            self._pulls[slice_].append((rank, step))
        else:
            flags = self._unchanged.get(slice_, 0)
            self._queue(rank, Kind.REPLY, step, slice_, priority, flags)

    def offer(self, slice_: int, priority: int, *, giver: int) -> None:
        """The first values go to all but the one who has sent them."""
        for rank in self._everybody:
            if rank != giver:
                self._queue(rank, Kind.REPLY, 0, slice_, priority, 0)

    def answer(
        self, slice_: int, step: int, priority: int, unchanged: int, *, is_average: bool
    ) -> None:
        """The slice is updated, or with ``is_average`` its gradient averaged."""
        to_pull = unchanged if is_average else 0
        self._unchanged[slice_] = to_pull
        if self._reply == "pull":
            for rank, _ in self._pulls.pop(slice_, ()):
                self._queue(rank, Kind.REPLY, step, slice_, priority, to_pull)
            return
        kind = Kind.REPLY if self._reply == "broadcast" else Kind.NOTIFY
        push = self.lanes.push
        for rank in self._everybody:
            frame = SendFrame(rank, kind, step, slice_, priority, unchanged, NO_TOKEN)
            push(rank, step, priority, frame)

    def send(self, message: MessageReady) -> None:
        """A control frame."""
        peer, kind, step, priority, slice_, token, flags = message
        frame = SendFrame(peer, kind, step, slice_, priority, flags, token)
        self.lanes.push(peer, step, priority, frame)

    def _queue(
        self, rank: int, kind: int, step: int, slice_: int, priority: int, flags: int
    ) -> None:
        frame = SendFrame(rank, kind, step, slice_, priority, flags, NO_TOKEN)
        self.lanes.push(rank, step, priority, frame)
