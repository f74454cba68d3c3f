"""A relay's side of the protocol as a state machine: local aggregation of dense slices.

Theory of operation ("Local aggregation": Kim et al., Parallax, section 5.3.2). A relay stands
between the workers of one node and one server: to the workers it is that server, to the server it
is one worker. A slice that all workers of the node have pushed is summed in rank order, and the sum
is pushed on, once; the server's answer goes to all of them. So collecting, answering and priority
are a `ServerMachine`'s whose updates are deferred until the server has answered; a second set of
lanes, with one peer, leads to the server. There is no push window: what a relay may push is what
each of its workers' windows has let go.

With ``reply="notify"`` or ``"pull"`` nothing crosses the node's link that nobody asked for: the
first worker's pull is passed on, and the others get a copy of its answer.

Rules: what the relay has pushed on is awaited; an answer to anything else is the server's protocol
error. When every worker has said goodbye, `Finish` comes as soon as all is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foreprop.core.collect import SliceUpdated, UpdateAnswered, UpdateDeferred, UpdateSlice
from foreprop.core.frames import (
    NO_TOKEN,
    SERVER,
    Finish,
    FrameSent,
    MessageReady,
    NotifyArrived,
    PeerLeft,
    Peers,
    PullArrived,
    PushArrived,
    ReplyArrived,
    SendFrame,
    ValueArrived,
    nodes,
)
from foreprop.core.sendqueue import Order, Reply, SendLanes
from foreprop.core.server_machine import ServerInstruction, ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.errors import InternalError, RemoteProtocolError

# With `SERVER` in the place of a peer or server, events and frames are those of the one server;
# all others are the workers', and `ServerMachine`'s. Its `UpdateSlice` asks for a sum, and
# `SliceUpdated` says that this is made.

RelayInstruction = ServerInstruction | Finish

_COMMON = Flag.VALUE_CHANGED | Flag.GRADIENT | Flag.MEASURE | -1 << ROUND_SHIFT
"""Flags that are the same on all of a slice's pushes; one worker's ``EXPOSED`` is the node's."""


def workers_of_node(node: int, world_size: int, workers_per_node: int) -> Peers:
    """A relay's: the workers of its node."""
    ranks = nodes(world_size, workers_per_node).ranks
    if not 0 <= node < len(ranks):
        raise RemoteProtocolError(f"there is no node {node} among {len(ranks)}")
    return Peers(tuple(range(rank, rank + 1) for rank in ranks[node]))


class _Awaited:
    """A slice that has been pushed on, until its values are here."""

    __slots__ = ("announced", "pulled", "pulls", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.announced = False
        self.pulled = False
        self.pulls: list[PullArrived] = []  # since the announcement


class RelayMachine:
    """Decides what a relay sums and sends next. Not thread-safe.

    ``server`` is the index of the one server that it leads to, ``peers`` are the node's workers.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        server: int,
        peers: Peers,
        order: Order,
        reply: Reply,
        names: Sequence[str],
    ) -> None:
        self._workers = ServerMachine(
            slices,
            index=server,
            workers=peers.count,
            order=order,
            reply=reply,
            names=names,
            peers=peers,
        )
        self.owned = self._workers.owned
        self.describe_wait = self._workers.describe_wait
        self.incomplete = self._workers.incomplete
        self._server = server
        self._has_rank_zero = peers.first_rank(0) == 0
        self._reply = reply
        self._to_server: SendLanes[SendFrame] = SendLanes(order)
        self._summing: UpdateSlice | None = None
        self._last_flags = 0
        self._common: dict[int, int] = {}  # by slice: what its step's pushes say
        self._valued: set[int] = set()  # slices whose values go before their push
        self._awaited: dict[int, _Awaited] = {}
        self._closing = False
        self._handlers: dict[type, Callable[[Any], list[RelayInstruction]]] = {
            PushArrived: self._on_push_arrived,
            ValueArrived: self._on_value_arrived,
            PullArrived: self._on_pull_arrived,
            SliceUpdated: self._on_sum_finished,
            PeerLeft: self._on_peer_left,
            FrameSent: self._on_frame_sent,
            MessageReady: self._on_message_ready,
            ReplyArrived: self._on_reply_arrived,
            NotifyArrived: self._on_notify_arrived,
        }

    def handle(self, event: Any) -> list[RelayInstruction]:
        """The only way state changes."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InternalError(f"a relay does not know the event {event!r}")
        return handler(event)

    # Read-only views.
    def awaits(self, slice_: int, step: int) -> bool:
        """Whether the server may send this slice's values now."""
        if step == 0:
            return not self._has_rank_zero and self._workers.is_fresh(slice_)
        awaited = self._awaited.get(slice_)
        if awaited is None or awaited.step != step:
            return False
        return self._reply == "broadcast" or awaited.pulled

    def has_pushed(self, slice_: int, step: int) -> bool:
        """Whether the slice's sum is on its way to the server, and no answer is here."""
        return slice_ in self._awaited and self._awaited[slice_].step == step

    def awaited(self) -> list[tuple[int, int]]:
        """What the server owes answers to: (slice, step)."""
        return [(slice_, awaited.step) for slice_, awaited in self._awaited.items()]

    @property
    def measures(self) -> bool:
        """Whether the last push has asked for its round's sums of squares."""
        return bool(self._last_flags & Flag.MEASURE)

    # What comes from the workers.
    def _on_push_arrived(self, event: PushArrived) -> list[RelayInstruction]:
        following = self._workers.handle(event)
        self._last_flags = event.flags & _COMMON
        exposed = (self._common.get(event.slice, 0) | event.flags) & Flag.EXPOSED
        self._common[event.slice] = self._last_flags | exposed
        return self._pass(following)

    def _on_value_arrived(self, event: ValueArrived) -> list[RelayInstruction]:
        following = self._workers.handle(event)
        if event.step > 0:
            self._valued.add(event.slice)
            return self._pass(following)
        self._enqueue(Kind.VALUE, 0, event.slice, event.priority)
        return self._pass(following) + self._departures()

    def _on_sum_finished(self, event: SliceUpdated) -> list[RelayInstruction]:
        summed, self._summing = self._summing, None
        if summed is None:
            raise InternalError("a sum finished that nobody started")
        following = self._pass(self._workers.handle(UpdateDeferred()))
        slice_, step, ranks = summed[:3]
        priority = self._workers.priority_of(slice_)
        if slice_ in self._valued:
            self._valued.remove(slice_)
            self._enqueue(Kind.VALUE, step, slice_, priority)
        flags = self._common.pop(slice_) | (0 if ranks else Flag.NO_GRADIENT)
        self._enqueue(Kind.PUSH, step, slice_, priority, int(flags))
        self._awaited[slice_] = _Awaited(step)
        if self._workers.is_pulled(slice_):
            self._pull(slice_, priority)
        return following + self._departures()

    def _on_pull_arrived(self, event: PullArrived) -> list[RelayInstruction]:
        awaited = self._awaited.get(event.slice)
        if awaited is None or self._reply == "broadcast":
            return self._pass(self._workers.handle(event))
        following: list[RelayInstruction] = []
        if self._reply == "notify":
            self._check_pull(event, awaited)
            awaited.pulls.append(event)
        else:
            following = self._pass(self._workers.handle(event))
        if not awaited.pulled:
            self._pull(event.slice, event.priority)
        return following + self._departures()

    def _check_pull(self, event: PullArrived, awaited: _Awaited) -> None:
        rank, slice_, step = event[:3]
        again = any(pull.rank == rank for pull in awaited.pulls)
        if step != awaited.step or not awaited.announced or again:
            raise RemoteProtocolError(
                f"worker {rank} of this node pulled slice {slice_} for step {step}: twice, or"
                " before it was announced"
            )

    def _on_peer_left(self, event: PeerLeft) -> list[RelayInstruction]:
        following = self._workers.handle(event)
        if any(isinstance(instruction, Finish) for instruction in following):
            self._closing = True
            return self._departures()
        return self._pass(following)

    # What comes from the server, and goes there.
    def _on_message_ready(self, event: MessageReady) -> list[RelayInstruction]:
        peer, kind, step, priority, slice_, token, flags = event
        if peer != SERVER:
            return self._pass(self._workers.handle(event))
        self._enqueue(kind, step, slice_, priority, flags, token)
        return self._departures()

    def _on_frame_sent(self, event: FrameSent) -> list[RelayInstruction]:
        if event.peer == SERVER:
            return self._left(self._to_server.sent(SERVER))
        return self._pass(self._workers.handle(event))

    def _on_reply_arrived(self, event: ReplyArrived) -> list[RelayInstruction]:
        slice_, step, _, priority, flags = event
        if not self.awaits(slice_, step):
            raise RemoteProtocolError(
                f"server {self._server} sent a reply for slice {slice_}, step {step}, which is not"
                " awaited"
            )
        if step == 0:
            return self._pass(self._workers.handle(ValueArrived(SERVER, slice_, 0, priority)))
        awaited = self._awaited.pop(slice_)
        if self._reply != "notify":
            return self._pass(self._workers.handle(UpdateAnswered(slice_, step, flags)))
        answers = [self._workers.handle(pull) for pull in awaited.pulls]
        return self._pass([each for answer in answers for each in answer])

    def _on_notify_arrived(self, event: NotifyArrived) -> list[RelayInstruction]:
        slice_, step, _, flags = event
        awaited = self._awaited.get(slice_)
        known = awaited is not None and awaited.step == step and not awaited.announced
        if awaited is None or not known or self._reply != "notify":
            raise RemoteProtocolError(
                f"server {self._server} announced slice {slice_} of step {step}, which is not"
                " awaited"
            )
        awaited.announced = True
        if flags & Flag.UNCHANGED:
            del self._awaited[slice_]
        return self._pass(self._workers.handle(UpdateAnswered(slice_, step, flags)))

    # Shared pieces.
    def _pass(self, instructions: Sequence[ServerInstruction]) -> list[RelayInstruction]:
        """What the workers' side is to do; remembers the one sum that is under way."""
        for instruction in instructions:
            if isinstance(instruction, UpdateSlice):
                self._summing = instruction
        return list(instructions)

    def _pull(self, slice_: int, priority: int) -> None:
        awaited = self._awaited[slice_]
        awaited.pulled = True
        self._enqueue(Kind.PULL, awaited.step, slice_, priority)

    def _enqueue(
        self,
        kind: int,
        step: int,
        slice_: int,
        priority: int,
        flags: int = 0,
        token: int = NO_TOKEN,
    ) -> None:
        frame = SendFrame(SERVER, kind, step, slice_, priority, flags, token)
        self._to_server.push(SERVER, step, priority, frame)

    def _departures(self) -> list[RelayInstruction]:
        return self._left(self._to_server.depart())

    def _left(self, frames: Sequence[SendFrame]) -> list[RelayInstruction]:
        sums = self._summing is not None or self._workers.update_depth
        if not frames and not sums and self._closing and self._to_server.idle:
            return [Finish()]
        return list(frames)
