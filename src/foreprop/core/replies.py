"""What a server sends to its peers: replies, announcements, and whatever else its shell has.

Theory of operation. With ``reply="broadcast"`` an updated slice goes to every peer at once. With
``"notify"`` it is announced, and with ``"pull"`` nothing is said: then each peer has to ask, once,
and a pull that comes before the update waits for it. All frames go through the same lanes, with the
priority that the slice's pushes carried.
"""

from __future__ import annotations

from collections import defaultdict

from foreprop.core.collect import Pushes
from foreprop.core.frames import NO_TOKEN, MessageReady, PullArrived, SendFrame
from foreprop.core.manifest import Reply
from foreprop.core.peers import Peers
from foreprop.core.sendqueue import USUAL_TURNS, Order, SendLanes, Turns
from foreprop.core.wire import Kind
from foreprop.errors import RemoteProtocolError


class Replies:
    """Queues a server's frames and remembers who waits for which slice. Not thread-safe."""

    def __init__(
        self, peers: Peers, *, order: Order, reply: Reply, turns: Turns = USUAL_TURNS
    ) -> None:
        self.lanes: SendLanes[SendFrame] = SendLanes(order, turns=turns)
        self._peers = peers
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
        for rank in range(self._peers.count):
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
        for rank in range(self._peers.count):
            self._queue(rank, kind, step, slice_, priority, unchanged)

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
