"""What processes' own time does to frames."""

from __future__ import annotations

from foreprop.simulate.connection import Clock
from foreprop.workload.network import wire_bytes


class Processor:
    """A process's: frames take turns, whoever's thread they are for.

    Each takes ``frame_s``, and ``byte_s`` for every byte, or ``row_byte_s`` if that is of rows.
    """

    def __init__(
        self,
        clock: Clock,
        frame_s: float,
        link_byte_s: float,
        *,
        byte_s: float = 0.0,
        row_byte_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._frame_s = frame_s
        self._byte_s = byte_s
        self._row_byte_s = byte_s if row_byte_s is None else row_byte_s
        self._link_byte_s = link_byte_s
        self._busy_until_s = 0.0

    def received_s(self, copies: int, size_bytes: int, *, of_rows: bool = False) -> float:
        """When it has seen the last of so many frames, which have come in one after the other."""
        begins_s = self._clock.now_s - self._passing_s(copies, size_bytes)
        return self._take(begins_s, copies, size_bytes, of_rows)

    def leaves_s(self, copies: int, size_bytes: int, *, of_rows: bool = False) -> float:
        """When to send so many frames, so that the last one leaves when it has got there."""
        ends_s = self._take(self._clock.now_s, copies, size_bytes, of_rows)
        return max(self._clock.now_s, ends_s - self._passing_s(copies, size_bytes))

    def _take(self, begins_s: float, copies: int, size_bytes: int, of_rows: bool) -> float:
        byte_s = self._row_byte_s if of_rows else self._byte_s
        takes_s = copies * (self._frame_s + size_bytes * byte_s)
        self._busy_until_s = max(self._busy_until_s, begins_s) + takes_s
        return self._busy_until_s

    def _passing_s(self, copies: int, size_bytes: int) -> float:
        """From the first frame to the last one."""
        return (copies - 1) * wire_bytes(size_bytes) * self._link_byte_s
