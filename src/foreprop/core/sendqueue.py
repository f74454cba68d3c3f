"""The queues in front of a process's connections (and in front of a server's updater).

Total order: the key is (step, priority, sequence), so equal priorities leave in the order in
which they came. On one connection nothing can be skipped: if the peer is full, the head waits.
Few peers do not wait for each other: a full one would leave the link idle, which others could use.
With more than few servers a worker's pushes also wait for answers, see `core.pushwindow`.
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
"""Enough for a link to be busy although some peers are slow; with so few, nobody waits."""
AT_LEAST = 8
"""So many of them keep a node's link busy."""


def takes_turns(order: Order, peers: int, at_once: int = AT_ONCE) -> bool:
    """Whether some of so many peers wait while others are sent to (`SendLanes`)."""
    return order == "priority" and peers > at_once


_FEW_SERVERS = 4
"""With eight, workers that run ahead cost a twentieth of a step (docs/notebook/uneven.md)."""


def runs_ahead(order: Order, servers: int) -> bool:
    """Whether a worker pushes on while others are behind: see `core.sendbound`."""
    return order == "priority" and servers <= _FEW_SERVERS


class SendQueue(Generic[T]):
    """A stable priority queue; with ``order="fifo"`` step and priority are ignored."""

    __slots__ = ("_fifo", "heap", "sequence")

    def __init__(self, order: Order = "priority") -> None:
        self.heap: list[tuple[int, int, int, T]] = []
        """What is queued, by (step, priority, sequence); the first one is the head."""
        self._fifo = order == "fifo"
        self.sequence = 0
        """Of the next item, among those that are equally urgent."""

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
        """What is queued, most urgent first; for reports, not for the hot path."""
        return [entry[3] for entry in sorted(self.heap, key=lambda entry: entry[:3])]


class Turns(NamedTuple):
    """How peers take turns in `SendLanes` in order of priority."""

    first: int = 0
    """Of equally urgent items those for peers from this one on go first. If every process has
    another one, they do not all send to the same peer at once."""
    at_once: int = AT_ONCE
    """To so many peers items are under way."""
    at_least: int = 0
    """With fewer under way, ``may_leave`` is told that the link might be idle."""
    in_order: bool = False
    """Of equally urgent items the first one goes first, whoever it is for."""

    @classmethod
    def after(cls, own: int, peers: int, at_once: int = AT_ONCE) -> Turns:
        """Of a process that is number ``own`` among its equals: first the peer that follows."""
        at_least = AT_LEAST if takes_turns("priority", peers, at_once) else 0
        return cls((own + 1) % peers, at_once, at_least)


USUAL_TURNS = Turns()
ONE_LANE = Turns(at_once=1, in_order=True)
"""P3's consumer: it takes the most urgent slice and blocks until that has left (section 4.2)."""


def turns_of(lanes: LaneRule, own: int, peers: int) -> Turns:
    """Of a process that is number ``own`` among its equals."""
    return ONE_LANE if lanes == "one" else Turns.after(own, peers)


class SendLanes(Generic[T]):
    """A `SendQueue` for each peer, at most one item of each under way.

    In order of priority peers take ``turns``, the most urgent item first: what has left cannot be
    overtaken, and with many peers fills the queue in front of the link. ``may_leave`` is asked
    about a head, and told whether too few are under way; if it refuses, the head stays, and all
    behind it, until somebody asks again.
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
        """The head for this peer, if there is one and it may leave now."""
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
        """What was under way to this peer has left: what may follow, to it or instead of it."""
        was_full = len(self._busy) >= self._at_once
        self._busy.discard(peer)
        is_short = len(self._busy) < self._at_least
        return self.depart() if was_full or is_short else self.depart_to(peer)

    def forget(self, peer: int) -> None:
        """It is gone: what is queued for it leaves no more. What is under way is still `sent`."""
        queue = self._queues.pop(peer, None)
        self.queued -= 0 if queue is None else len(queue)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._busy and not self.queued

    def is_idle(self, peer: int) -> bool:
        """The same of one peer."""
        return peer not in self._busy and not self._queues.get(peer)

    def __len__(self) -> int:
        return self.queued

    def items(self) -> list[T]:
        """What is queued, for reports: peer by peer, most urgent first."""
        return [item for queue in self._queues.values() for item in queue.items()]


_LEAST_SHARE_BYTES = 4096
"""About the least that Linux takes for a send buffer."""


def window_share_bytes(window_bytes: int, peers: int, order: Order) -> int:
    """Of what may be under way to all peers, unacknowledged, the share of a connection.

    Where peers take turns (`SendLanes`), a node's worker and its server, which send
    to as many as may have theirs at once, share it. With the defaults that is less than a slice.
    """
    shares = 2 * AT_ONCE if takes_turns(order, peers) else peers
    return max(_LEAST_SHARE_BYTES, window_bytes // shares)
