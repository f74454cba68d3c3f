"""Spans on tracks where none overlaps another in part, at times that every reader takes alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_EIGHTHS_NS = 125


def exact_ns(us: float) -> int:
    """Microseconds as nanoseconds, to an eighth of a microsecond.

    The file has microseconds, in decimals. Some versions of Perfetto multiply them by 1000 and cut
    off the rest, so that 0.001 becomes 0 or 1 ns and neighbours overlap. Eighths stay what they
    are, in binary too.
    """
    return round(us * 8) * _EIGHTHS_NS


class Span(NamedTuple):
    """Nanoseconds from the first event of all, as `exact_ns` makes them."""

    start_ns: int
    stop_ns: int
    category: str
    name: str
    args: Mapping[str, Any]

    @property
    def slice_key(self) -> tuple[int, int]:
        """Which slice of which step."""
        return self.args["slice"], self.args["step"]


class Placed(NamedTuple):
    """A span on a track of a process."""

    process: int
    track: int
    span: Span


def place(spans: Iterable[Span], *, same_ns: int = 0) -> list[list[Span]]:
    """As few rows as it takes for each span to lie beside or within others of its row.

    Where two overlap by no more than ``same_ns``, the second one begins so much later.
    """
    rows: list[_Row] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.stop_ns)):
        if not any(row.takes(span, same_ns) for row in rows):
            rows.append(_Row())
            rows[-1].takes(span, same_ns)
    return [row.spans for row in rows]


class _Row:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open_until: list[int] = []
        """When the spans stop that the next one may lie within, the outermost first."""

    def takes(self, span: Span, same_ns: int) -> bool:
        """Add it, if it fits; spans come in the order of their starts."""
        start_ns, open_until = span.start_ns, self._open_until
        while open_until and open_until[-1] <= start_ns:
            open_until.pop()
        if open_until and span.stop_ns > open_until[-1]:
            if len(open_until) > 1 or open_until[-1] - start_ns > same_ns:
                return False
            start_ns = open_until.pop()
        self.spans.append(span._replace(start_ns=start_ns))
        open_until.append(span.stop_ns)
        return True
