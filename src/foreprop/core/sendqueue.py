"""The queues in front of a process's connections (and in front of a server's updater).

Total order: the key is (step, priority, sequence), so equal priorities leave in the order in
which they came. On one connection nothing can be skipped: if the peer is full, the head waits.
Peers do not wait for each other: a full one would leave the link idle, which others could use.
"""

from __future__ import annotations

import heapq
from typing import Generic, Literal, TypeVar

Order = Literal["priority", "fifo"]
T = TypeVar("T")


class SendQueue(Generic[T]):
    """A stable priority queue; with ``order="fifo"`` step and priority are ignored."""

    __slots__ = ("_fifo", "_heap", "_sequence")

    def __init__(self, order: Order = "priority") -> None:
        self._fifo = order == "fifo"
        self._heap: list[tuple[int, int, int, T]] = []
        self._sequence = 0

    def push(self, step: int, priority: int, item: T) -> None:
        if self._fifo:
            step = priority = 0
        heapq.heappush(self._heap, (step, priority, self._sequence, item))
        self._sequence += 1

    def pop(self) -> T:
        return heapq.heappop(self._heap)[3]

    def __len__(self) -> int:
        return len(self._heap)

    def items(self) -> list[T]:
        """What is queued, most urgent first; for reports, not for the hot path."""
        return [entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3])]


class SendLanes(Generic[T]):
    """A `SendQueue` for each peer, at most one item of each under way."""

    __slots__ = ("_busy", "_order", "_queues")

    def __init__(self, order: Order = "priority") -> None:
        self._order: Order = order
        self._queues: dict[int, SendQueue[T]] = {}
        self._busy: set[int] = set()

    def push(self, peer: int, step: int, priority: int, item: T) -> None:
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = SendQueue(self._order)
        queue.push(step, priority, item)

    def depart(self) -> list[T]:
        """The head for each peer that nothing is under way to; it then is."""
        return [
            self._leave(peer, queue)
            for peer, queue in self._queues.items()
            if queue and peer not in self._busy
        ]

    def sent(self, peer: int) -> list[T]:
        """What was under way to this peer has left: its next head, if there is one."""
        self._busy.discard(peer)
        queue = self._queues.get(peer)
        return [self._leave(peer, queue)] if queue else []

    def _leave(self, peer: int, queue: SendQueue[T]) -> T:
        self._busy.add(peer)
        return queue.pop()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._busy and not len(self)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def items(self) -> list[T]:
        """What is queued, for reports: peer by peer, most urgent first."""
        return [item for queue in self._queues.values() for item in queue.items()]
