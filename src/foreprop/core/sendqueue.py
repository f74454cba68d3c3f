"""The queues in front of a process's connections (and in front of a server's updater).

Total order: the key is (step, priority, sequence), so equal priorities leave in the order in
which they came. On one connection nothing can be skipped: if the peer is full, the head waits.
Few peers do not wait for each other: a full one would leave the link idle, which others could use.
A worker's pushes also wait for answers, see `PushWindow`.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

Order = Literal["priority", "fifo"]
Reply = Literal["broadcast", "notify", "pull"]
T = TypeVar("T")

AT_ONCE = 12
"""Enough for a link to be busy although some peers are slow; with so few, nobody waits."""
AT_LEAST = 8
"""So many of them keep a node's link busy."""


def takes_turns(order: Order, peers: int, at_once: int = AT_ONCE) -> bool:
    """Whether some of so many peers wait while others are sent to (`SendLanes`)."""
    return order == "priority" and peers > at_once


class SendQueue(Generic[T]):
    """A stable priority queue; with ``order="fifo"`` step and priority are ignored."""

    __slots__ = ("_fifo", "_sequence", "heap")

    def __init__(self, order: Order = "priority") -> None:
        self.heap: list[tuple[int, int, int, T]] = []
        """What is queued, by (step, priority, sequence); the first one is the head."""
        self._fifo = order == "fifo"
        self._sequence = 0

    def push(self, step: int, priority: int, item: T) -> None:
        if self._fifo:
            step = priority = 0
        heapq.heappush(self.heap, (step, priority, self._sequence, item))
        self._sequence += 1

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

    @classmethod
    def after(cls, own: int, peers: int, at_once: int = AT_ONCE) -> Turns:
        """Of a process that is number ``own`` among its equals: first the peer that follows."""
        at_least = AT_LEAST if takes_turns("priority", peers, at_once) else 0
        return cls((own + 1) % peers, at_once, at_least)


USUAL_TURNS = Turns()


class SendLanes(Generic[T]):
    """A `SendQueue` for each peer, at most one item of each under way.

    In order of priority peers take ``turns``, the most urgent item first: what has left cannot be
    overtaken, and with many peers fills the queue in front of the link. ``may_leave`` is asked
    about a head, and told whether too few are under way; if it refuses, the head stays, and all
    behind it, until somebody asks again.
    """

    __slots__ = (
        "_at_least",
        "_at_once",
        "_busy",
        "_first",
        "_may_leave",
        "_order",
        "_queues",
        "queued",
    )

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
        self._queues: dict[int, SendQueue[T]] = {}
        self._busy: set[int] = set()

    def push(self, peer: int, step: int, priority: int, item: T) -> None:
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = SendQueue(self._order)
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

    def _turn(self, peer: int) -> tuple[tuple[int, int], bool, int]:
        return self._queues[peer].heap[0][:2], peer < self._first, peer

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

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._busy and not self.queued

    def __len__(self) -> int:
        return self.queued

    def items(self) -> list[T]:
        """What is queued, for reports: peer by peer, most urgent first."""
        return [item for queue in self._queues.values() for item in queue.items()]


_Urgency = tuple[int, int, int]
"""(step, priority, slice): what is smaller is more urgent, and every worker agrees on it."""

_LEAST_SLICES = 2
"""One can be on its way to a server while another is on its way back."""
_MOST_SLICES = 4
"""However many servers there are: beyond, what is urgent comes too late."""
_LEAST_SHARE_BYTES = 4096
"""About the least that Linux takes for a send buffer."""


def window_share_bytes(window_bytes: int, peers: int, order: Order) -> int:
    """Of what may be under way to all peers, unacknowledged, the share of a connection.

    Where peers take turns (`SendLanes`), a node's worker and its server, which send
    to as many as may have theirs at once, share it. With the defaults that is less than a slice.
    """
    shares = 2 * AT_ONCE if takes_turns(order, peers) else peers
    return max(_LEAST_SHARE_BYTES, window_bytes // shares)


def may_hold_back(order: Order, reply: Reply, *, needs_norm: bool = False) -> bool:
    """Whether workers agree on what goes first, and their pushes are answered unasked.

    With ``needs_norm`` no push of a step is answered before all of them have left.
    """
    return (order, reply) == ("priority", "broadcast") and not needs_norm


def holds_back(order: Order, reply: Reply, servers: int, *, needs_norm: bool = False) -> bool:
    """Whether a worker's pushes wait for answers (`PushWindow`): where servers take turns.

    Fewer connections hold so little (`core.sendbound`) that what runs ahead holds up nothing, and a
    worker that waited for slower ones would leave its link idle.
    """
    return takes_turns(order, servers) and may_hold_back(order, reply, needs_norm=needs_norm)


class PushWindow:
    """Holds a push back while the server owes the answers to enough that are more urgent.

    A slice is updated when every worker has pushed it, so a worker that runs ahead of the others
    completes nothing; its pushes only fill the queues in front of links which the slices that
    the others wait for need as well. And what has left can be overtaken no more. So a push waits
    while enough that are more urgent are unanswered at its server: its share of ``window_bytes``,
    and two slices, or half as many as there are servers up to four; where they are many, a slice
    that is late at one of them holds up more. ``sizes_bytes`` are those of the slices, by number.

    An idle link is worse than that. So while it is short of pushes, only those wait whose own
    parameter is the most urgent one that the server owes.

    Nobody waits for ever: of the slices that a server has not updated, no worker ever holds back
    the most urgent one, because all that are more urgent will be answered. This needs all workers
    to rank slices alike, which they do with rank 0's priorities, but not in fifo order
    (`may_hold_back`).
    """

    def __init__(self, sizes_bytes: Sequence[int], window_bytes: int, *, servers: int = 1) -> None:
        self._sizes_bytes = sizes_bytes
        self._window_bytes = window_bytes // servers
        self._least_slices = max(_LEAST_SLICES, min(_MOST_SLICES, servers // 2))
        self._unanswered: defaultdict[int, list[_Urgency]] = defaultdict(list)
        """By server, most urgent first."""
        self._unanswered_bytes: defaultdict[int, int] = defaultdict(int)
        self._urgency_of: dict[int, _Urgency] = {}  # by slice

    def admits(
        self, server: int, step: int, priority: int, slice_: int, *, is_short: bool = False
    ) -> bool:
        """Whether the push may leave now; ``is_short``: too few are under way to any server."""
        if self._unanswered_bytes[server] < self._window_bytes:
            return True
        unanswered = self._unanswered[server]
        ahead = unanswered[: bisect_right(unanswered, (step, priority, slice_))]
        return (
            len(ahead) < self._least_slices
            or (is_short and ahead[0][:2] != (step, priority))
            or sum(self._sizes_bytes[urgency[2]] for urgency in ahead) < self._window_bytes
        )

    def left(self, server: int, step: int, priority: int, slice_: int) -> None:
        """The push has left, with its gradient."""
        urgency = self._urgency_of[slice_] = (step, priority, slice_)
        insort(self._unanswered[server], urgency)
        self._unanswered_bytes[server] += self._sizes_bytes[slice_]

    def answered(self, server: int, slice_: int) -> None:
        """The slice's answer is in; of no consequence if its push has carried nothing."""
        urgency = self._urgency_of.pop(slice_, None)
        if urgency is not None:
            self._unanswered[server].remove(urgency)
            self._unanswered_bytes[server] -= self._sizes_bytes[slice_]
