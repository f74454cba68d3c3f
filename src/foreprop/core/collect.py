"""A server's record of a slice, its own events and instructions, and the queue of its replies.

A closing rule decides which pushes close a slice's round (`core.closing`). Slices, shards of rows
and a node's sums have the same record (`SliceState`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from foreprop.core.frames import NO_TOKEN, MessageReady, Peers, PullArrived, Round, SendFrame
from foreprop.core.norm import SquareSum
from foreprop.core.sendqueue import USUAL_TURNS, Order, Reply, SendLanes, Turns
from foreprop.core.wire import Flag, Kind
from foreprop.errors import RemoteProtocolError


# Events that only servers know.
class SliceUpdated(NamedTuple):
    """The update under way is done; ``squares`` are the average's by parameter, if asked for."""

    squares: tuple[SquareSum, ...] = ()


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
    """The workers update: the average gradient is the answer, and the values stay."""
    measure: bool = False
    """Say in `SliceUpdated` what the average's squares add up to."""
    counted: tuple[int, ...] | None = None
    """Whose pushes have closed the round, with a gradient or without; None: everybody's."""


class SumSlice(NamedTuple):
    """Add up the gradients, and keep the sum for the update; as `UpdateSlice` otherwise."""

    slice: int
    step: int
    ranks: tuple[int, ...]
    counted: tuple[int, ...] | None = None


class SendSquares(NamedTuple):
    """Tell every worker the sums of squares of all slices, in the order of their numbers.

    A pack has one for each of its parameters (`core.slicing`).
    """

    step: int
    squares: tuple[SquareSum, ...]


class AnswerSlice(NamedTuple):
    """Send these ranks the slice's values, as the answer to what they have pushed for ``step``."""

    slice: int
    step: int
    priority: int
    ranks: tuple[int, ...]
    flags: int = 0
    is_average: bool = False
    """The answer is the average gradient: the values are as they were."""


class DropPush(NamedTuple):
    """Forget the gradient that a rank has pushed: it is not counted."""

    slice: int
    rank: int
    step: int


# What is known of a slice.
NEVER: Round = (-1, 0)


def check_giver(peers: Peers, peer: int) -> None:
    """Raises `RemoteProtocolError` for values that are not rank 0's."""
    if peers.first_rank(peer) != 0:
        raise RemoteProtocolError(f"{peers.name(peer)} sent parameter values; only rank 0 may")


@dataclass(slots=True, eq=False)
class SliceState:
    """What a server knows of one slice or shard: its pushes, what is done, and who is owed what.

    In messages ``what`` names it, and ``use`` is what nobody may do with it after a goodbye.
    """

    number: int
    name: str
    what: str = field(kw_only=True)
    use: str = field(kw_only=True)
    done: Round = field(default=NEVER, kw_only=True)
    """The last round that is in the values; step 0: the values to begin from."""
    rounds: dict[Round, dict[int, int]] = field(default_factory=dict)
    """The pushes' flags, by round and peer."""
    updating: int = 0
    """The step that is closed and not done; 0: none, or the rule sees that from `rounds`."""
    priority: int = 0
    """The most urgent that a push of the open round has carried."""
    valued: int = -1
    """The last step that rank 0 has sent values for."""
    last: list[Round] = field(default_factory=list)
    """The last round that each peer has pushed, in a rule that knows each by itself."""
    owed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The step and priority of each peer that has pushed and is not answered."""

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

    def take_values(self, step: int, pushed: Mapping[int, int]) -> None:
        """Note that rank 0 has sent values, which it must do before it has ``pushed``.

        `RemoteProtocolError` leaves everything as it was.
        """
        if step <= max(self.done_step, self.valued) or 0 in pushed or 0 in self.owed:
            late = f"step {self.done_step} is done" if step <= self.done_step else "twice or late"
            raise RemoteProtocolError(f"values for {self.what} came for step {step}: {late}")
        self.valued = step
        if not step:
            self.done = (0, 0)


def with_gradient(pushed: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(peer for peer in sorted(pushed) if not pushed[peer] & Flag.NO_GRADIENT)


class Replies:
    """A server's send queue, and the pulls that wait for an update. Not thread-safe."""

    def __init__(
        self, peers: Peers, *, order: Order, reply: Reply, turns: Turns = USUAL_TURNS
    ) -> None:
        self.lanes: SendLanes[SendFrame] = SendLanes(order, turns=turns)
        self._peers = peers
        self._reply = reply
        self._pulls: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """The rank and step of each pull that came before the update, by slice."""
        self._unchanged: dict[int, int] = {}
        """`Flag.UNCHANGED` by slice, where no rank had a gradient and no average can be pulled."""

    def describe(self, slice_: int) -> str:
        """Which replies of an updated slice are still queued, in words."""
        kinds = (Kind.REPLY, Kind.NOTIFY)
        queued = [f for f in self.lanes.items() if f.slice == slice_ and f.kind in kinds]
        if not queued:
            return "no reply is queued"
        return f"replies still queued for {self._peers.listed(sorted(f.peer for f in queued))}"

    def pull(self, event: PullArrived, state: SliceState) -> None:
        """Reply now, or when the update is done. `RemoteProtocolError` leaves all as it was."""
        rank, slice_, step, priority, _ = event
        what = f"{self._peers.name(rank)} pulled slice {slice_}"
        if self._reply == "broadcast":
            raise RemoteProtocolError(f"{what}; replies are broadcast")
        if (rank, step) in self._pulls.get(slice_, ()):
            raise RemoteProtocolError(f"{what} twice in step {step}")
        pushed = rank in state.at(step)
        if not pushed and step != state.done_step:
            raise RemoteProtocolError(
                f"{what} for step {step}, which it has not pushed; step {state.done_step} is done"
            )
        if pushed:
            self._pulls[slice_].append((rank, step))
        else:
            flags = self._unchanged.get(slice_, 0)
            self.send(MessageReady(rank, Kind.REPLY, step, priority, slice_, NO_TOKEN, flags))

    def answer(self, answer: AnswerSlice) -> None:
        slice_, step, priority, ranks, flags, is_average = answer
        to_pull = flags if is_average else 0
        kind = Kind.REPLY
        if step:
            self._unchanged[slice_] = to_pull
            kind = Kind.NOTIFY if self._reply == "notify" else kind
        if step and self._reply == "pull":
            ranks = tuple(rank for rank, _ in self._pulls.pop(slice_, ()))
            flags = to_pull
        push = self.lanes.push
        for rank in ranks:
            frame = SendFrame(rank, kind, step, slice_, priority, flags, NO_TOKEN)
            push(rank, step, priority, frame)

    def send(self, message: MessageReady) -> None:
        peer, kind, step, priority, slice_, token, flags = message
        frame = SendFrame(peer, kind, step, slice_, priority, flags, token)
        self.lanes.push(peer, step, priority, frame)
