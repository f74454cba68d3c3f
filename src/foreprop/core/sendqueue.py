"""The queue in front of a link (and in front of a server's updater).

Total order: the key is (step, priority, sequence), so equal priorities leave in the order in
which they came. Nothing here can be skipped: if the head's destination is full, the head waits.
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
