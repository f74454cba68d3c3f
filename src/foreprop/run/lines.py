"""Whole lines out of whatever pieces a pipe gives."""

from __future__ import annotations

LIMIT_BYTES = 65_536


class LineSplitter:
    """Bytes in, whole lines out, without their ends.

    A line that overwrites itself (a progress bar's carriage returns) is what a terminal would show
    of it in the end. One without end is passed on in pieces of ``limit_bytes``.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [piece for line in whole for piece in self._pieces(_shown(line))]
        if len(self._rest) > self._limit_bytes:
            self._rest = _shown(self._rest)  # or a progress bar would be kept from its beginning
        while len(self._rest) > self._limit_bytes:
            lines.append(self._rest[: self._limit_bytes])
            self._rest = self._rest[self._limit_bytes :]
        return lines

    def _pieces(self, line: bytes) -> list[bytes]:
        step = self._limit_bytes
        return [line[start : start + step] for start in range(0, len(line), step)] or [line]

    def finish(self) -> list[bytes]:
        """What had no line end: one line, or none."""
        rest, self._rest = _shown(self._rest), b""
        return [rest] if rest else []


def _shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
