"""The queues in front of a process's connections (and in front of a server's updater).

The order is total: the key is (step, priority, sequence), so equal priorities leave in the order in
which they came. On one connection nothing can be skipped: if the peer is full, the head waits. Few
peers do not wait for each other: while one is full, the link would be idle that others could use.
Many peers take turns (`SendLanes`). With more than few servers a worker's pushes also wait for
answers (`core.pushwindow`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeVar

Order = Literal["priority", "fifo"]
Reply = Literal["broadcast", "notify", "pull"]
LaneRule = Literal["peers", "one"]
T = TypeVar("T")

AT_ONCE = 12
"""How many peers are sent to at once: enough for a busy link although some peers are slow."""
AT_LEAST = 8
"""How many peers keep a node's link busy."""


def takes_turns(order: Order, peers: int, at_once: int = AT_ONCE) -> bool:
    """Whether some of so many peers wait while others are sent to (`SendLanes`)."""
    return order == "priority" and peers > at_once


_FEW_SERVERS = 4
"""Workers that run ahead cost a twentieth of a step with eight (lab/docs/notebook/uneven.md)."""


def runs_ahead(order: Order, servers: int) -> bool:
    """Whether a worker pushes on while others are behind; see `SendBound` for why it may."""
    return order == "priority" and servers <= _FEW_SERVERS


class SendQueue(Generic[T]):
    """A stable priority queue; with ``order="fifo"`` step and priority are ignored."""

    __slots__ = ("_fifo", "heap", "sequence")

    def __init__(self, order: Order = "priority") -> None:
        self.heap: list[tuple[int, int, int, T]] = []
        """The items with their (step, priority, sequence); the first one is the head."""
        self._fifo = order == "fifo"
        self.sequence = 0  # the next item's number, which orders items that are equally urgent

    def push(self, step: int, priority: int, item: T) -> None:
        if self._fifo:
            step = priority = 0
        heapq.heappush(self.heap, (step, priority, self.sequence, item))
        self.sequence += 1

    def pop(self) -> T:
        return heapq.heappop(self.heap)[3]

    def __len__(self) -> int:
        return len(self.heap)

    def items(self) -> list[T]:
        """The items, most urgent first; for reports, not for the hot path."""
        return [entry[3] for entry in sorted(self.heap, key=lambda entry: entry[:3])]


class Turns(NamedTuple):
    """How peers take turns in `SendLanes` in order of priority.

    At most ``at_once`` peers have items under way to them. With fewer than ``at_least`` the link
    might be idle, and ``may_leave`` is told so. Of equally urgent items those for peers from
    ``first`` on go first, so that processes with different ones do not all send to the same peer;
    or with ``in_order`` the item that came first, whoever it is for.
    """

    first: int = 0
    at_once: int = AT_ONCE
    at_least: int = 0
    in_order: bool = False

    @classmethod
    def after(cls, own: int, peers: int, at_once: int = AT_ONCE) -> Turns:
        """The turns of process number ``own`` among its equals: the next peer goes first."""
        at_least = AT_LEAST if takes_turns("priority", peers, at_once) else 0
        return cls((own + 1) % peers, at_once, at_least)


USUAL_TURNS = Turns()
ONE_LANE = Turns(at_once=1, in_order=True)
"""P3's consumer: it takes the most urgent slice and blocks until that has left (section 4.2)."""


def turns_of(lanes: LaneRule, own: int, peers: int) -> Turns:
    return ONE_LANE if lanes == "one" else Turns.after(own, peers)


class SendLanes(Generic[T]):
    """A `SendQueue` for each peer, of which at most one item is under way.

    In order of priority peers take ``turns``, the most urgent item first: what has left cannot be
    overtaken, and with many peers it fills the queue in front of the link. ``may_leave`` is called
    with a head, and with whether too few items are under way. If it refuses, the head and all
    behind it stay until it is called again.
    """

    __slots__ = (
        "_at_least _at_once _busy _first _in_order _may_leave _order _pushed _queues queued"
    ).split()

    def __init__(
        self,
        order: Order = "priority",
        may_leave: Callable[[T, bool], bool] | None = None,
        *,
        turns: Turns = USUAL_TURNS,
    ) -> None:
        self.queued = 0
        self._order: Order = order
        self._may_leave = may_leave
        self._first = turns.first
        self._at_once = turns.at_once if order == "priority" else math.inf
        self._at_least = turns.at_least if may_leave is not None else 0
        self._in_order, self._pushed = turns.in_order, 0
        self._queues: dict[int, SendQueue[T]] = {}
        self._busy: set[int] = set()

    def push(self, peer: int, step: int, priority: int, item: T) -> None:
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = SendQueue(self._order)
        if self._in_order:
            self._pushed = queue.sequence = self._pushed + 1
        queue.push(step, priority, item)
        self.queued += 1

    def depart(self) -> list[T]:
        """The heads that may leave now; they then are under way."""
        departing: list[T] = []
        if len(self._busy) >= self._at_once:
            return departing
        waiting = []
        for peer, queue in self._queues.items():
            if queue.heap and peer not in self._busy:
                waiting.append(peer)
        if self._order == "priority" and len(waiting) > 1:
            waiting.sort(key=self._turn)
        for peer in waiting:
            departing += self.depart_to(peer)
        return departing

    def _turn(self, peer: int) -> tuple[tuple[int, int], int, int]:
        step, priority, sequence, _ = self._queues[peer].heap[0]
        if self._in_order:
            return (step, priority), sequence, peer
        return (step, priority), peer < self._first, peer

    def depart_to(self, peer: int) -> list[T]:
        """The head for this peer, if there is one that may leave now."""
        queue, busy = self._queues.get(peer), len(self._busy)
        if queue is None or not queue.heap or peer in self._busy or busy >= self._at_once:
            return []
        may_leave = self._may_leave
        if may_leave is not None and not may_leave(queue.heap[0][3], busy < self._at_least):
            return []
        self._busy.add(peer)
        self.queued -= 1
        return [queue.pop()]

    def sent(self, peer: int) -> list[T]:
        """Note that the item under way to a peer has left; returns the items that may follow it."""
        was_full = len(self._busy) >= self._at_once
        self._busy.discard(peer)
        is_short = len(self._busy) < self._at_least
        return self.depart() if was_full or is_short else self.depart_to(peer)

    def forget(self, peer: int) -> None:
        """Drop what is queued for a peer that is lost; an item under way to it is still `sent`."""
        queue = self._queues.pop(peer, None)
        self.queued -= 0 if queue is None else len(queue)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._busy and not self.queued

    def is_idle(self, peer: int) -> bool:
        return peer not in self._busy and not self._queues.get(peer)

    def __len__(self) -> int:
        return self.queued

    def items(self) -> list[T]:
        """The queued items, for reports: peer by peer, most urgent first."""
        return [item for queue in self._queues.values() for item in queue.items()]


_LEAST_SHARE_BYTES = 4096  # about the least that Linux takes for a send buffer


def window_share_bytes(window_bytes: int, peers: int, order: Order) -> int:
    """A connection's share of the unacknowledged bytes that may be under way to all peers."""
    # where peers take turns, a node's worker and its server send to so many at once, each; with the
    # defaults a share is then less than a slice
    shares = 2 * AT_ONCE if takes_turns(order, peers) else peers
    return max(_LEAST_SHARE_BYTES, window_bytes // shares)


_NO_QUEUE = 1.5  # round trips of less than so many times the shortest show that nothing queues
_QUEUE = 3.0
"""Round trips of more than so many times the shortest show that most bytes wait in a queue."""
_LEAST_SHARE = 4  # the part of the most that is the least (lab/docs/notebook/uneven.md)


def least_bytes(most_bytes: int) -> int:
    """The bound where frames queue: usually half a slice on each of four connections."""
    return most_bytes // _LEAST_SHARE


class SendBound:
    """How many unacknowledged bytes of a connection the kernel may hold.

    What the kernel has taken cannot be overtaken any more. So it should have little: then an urgent
    slice passes soon, and less waits in the queues in front of links, where pushes and replies of
    all nodes meet. Too little would leave the link idle, on paths with a larger product of
    bandwidth and round-trip time. The round trips of the frames themselves tell which it is, as in
    TCP Vegas (Brakmo and Peterson 1994): where they take about as long as the shortest ever,
    nothing queues. The kernel's own shortest one is of the last five minutes
    (``tcp_min_rtt_wlen``), in which a busy link may always have had a queue. The bound begins with
    ``most_bytes``, and never falls below `least_bytes`.
    """

    def __init__(self, most_bytes: int) -> None:
        self.bytes = most_bytes
        self._least_bytes = least_bytes(most_bytes)
        self._most_bytes = most_bytes
        self._shortest_us = float("inf")

    def observe(self, round_trip_us: int, shortest_us: float) -> bool:
        """Note the round trips as a frame has left; returns whether the bound has changed."""
        before = self.bytes
        self._shortest_us = shortest_us = min(self._shortest_us, shortest_us)
        if round_trip_us > _QUEUE * shortest_us:
            self.bytes = max(self._least_bytes, before // 2)
        elif round_trip_us < _NO_QUEUE * shortest_us:
            self.bytes = min(self._most_bytes, before * 2)
        return self.bytes != before
