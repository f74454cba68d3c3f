"""How many bytes of one connection the kernel may hold that have not been acknowledged.

What the kernel has taken can be overtaken no more. So it is to have little: then an urgent slice
passes it soon, and less waits in the queues in front of links, where pushes and replies of all
nodes meet. Too little would leave the link idle, on paths whose bandwidth x round-trip time is
larger. The round trips of the frames themselves tell which it is, as in TCP Vegas (Brakmo and
Peterson 1994): where they take about as long as the shortest ever, nothing queues. The kernel's is
that of five minutes (``tcp_min_rtt_wlen``), in which busy links may always have had a queue.
"""

from __future__ import annotations

_NO_QUEUE = 1.5
"""Round trips that are up to so many times the shortest: there is no queue, so there is room."""
_QUEUE = 3.0
"""From here on most of what is under way waits in some queue."""
_LEAST_SHARE = 4
"""Into so many parts the most is divided for the least (docs/notebook/uneven.md)."""


def least_bytes(most_bytes: int) -> int:
    """Where frames queue; of the usual settings half a slice on each of four connections."""
    return most_bytes // _LEAST_SHARE


class SendBound:
    """Of one connection; begins with ``most_bytes``, and never falls below `least_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.bytes = most_bytes
        self._least_bytes = least_bytes(most_bytes)
        self._most_bytes = most_bytes
        self._shortest_us = float("inf")

    def observe(self, round_trip_us: int, shortest_us: float) -> bool:
        """A frame has left when round trips took so long; whether the bound is another now."""
        before = self.bytes
        self._shortest_us = shortest_us = min(self._shortest_us, shortest_us)
        if round_trip_us > _QUEUE * shortest_us:
            self.bytes = max(self._least_bytes, before // 2)
        elif round_trip_us < _NO_QUEUE * shortest_us:
            self.bytes = min(self._most_bytes, before * 2)
        return self.bytes != before
