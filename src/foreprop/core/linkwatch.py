"""When links are to be measured again, and whether slices then move: rules with hysteresis.

Theory of operation. Arrivals show whose link is slow (`core.lateness`), but not how slow it is, so
links are measured before anything moves. It costs seconds, in which nobody trains. So it waits
until the same link has been named in `_WINDOWS` windows in a row: what passes by itself moves
nothing. Where servers own unlike shares, nobody need be late when a slow link is fast again. So
there links are measured now and then in any case. A pause lies between two measurements. It doubles
each time that nothing moved, up to `_MOST_PAUSES` of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreprop.core.lateness import Straggler
from foreprop.core.linkshares import WHOLE, ready_in, shares_of

_WINDOWS = 4
"""In a row, in which the same link is named."""
_MOST_PAUSES = 16
_LEAST_GAIN = 0.05
"""Of the time that the slowest link takes: for less slices do not move."""


class LinkWatch:
    """Rank 0's, for as long as the session lasts. Times are seconds of any one clock.

    ``pause_s``: the least between two measurements; ``uneven``: servers own unlike shares.
    """

    def __init__(self, *, pause_s: float, uneven: bool) -> None:
        self._first_pause_s = self._pause_s = pause_s
        self._uneven = uneven
        self._asked = False
        self._since_s: float | None = None  # the last measurement, or the first window
        self._rank: int | None = None
        self._seen = 0  # the rank's link, in so many windows in a row

    def observe(self, straggler: Straggler | None, now_s: float) -> bool:
        """At the end of a window; returns whether links are to be measured."""
        rank = None
        if straggler is not None and straggler.cause == "link":
            rank = straggler.rank
        if rank is None or rank != self._rank:
            self._seen = 0
        self._seen += rank is not None
        self._rank = rank
        if self._since_s is None:
            self._since_s = now_s
        if self._asked or now_s - self._since_s < self._pause_s:
            return False
        self._asked = self._uneven or self._seen >= _WINDOWS
        return self._asked

    def measured(self, now_s: float, *, moved: bool, uneven: bool) -> None:
        """Links have been, and slices ``moved`` or not; servers own unlike shares, or like ones."""
        self._pause_s = self._first_pause_s if moved else self._longer_pause_s()
        self._since_s, self._uneven = now_s, uneven
        self._asked, self._seen = False, 0

    def _longer_pause_s(self) -> float:
        return min(2 * self._pause_s, _MOST_PAUSES * self._first_pause_s)


def is_worth_moving(rates: Sequence[float], shares: Sequence[int]) -> bool:
    """Whether servers should own what suits these rates, by node, and no more the present shares.

    A node's share is its servers' together. The slowest link must be ready sooner by `_LEAST_GAIN`.
    """
    return ready_in(rates, shares) >= (1 + _LEAST_GAIN) * ready_in(rates, shares_of(rates))


def describe_move(before: Sequence[float], rates: Sequence[float], *, step: int) -> list[str]:
    """A line for each node whose rate is another one than ``before``; ``step`` is the first one."""
    shares = zip(shares_of(before), shares_of(rates), strict=True)
    return [
        f"from step {step} node {node}'s server owns {now / WHOLE:.0%} instead of"
        f" {was / WHOLE:.0%}: its link {_describe_rate(rates[node])}"
        for node, (was, now) in enumerate(shares)
        if rates[node] != before[node]
    ]


def _describe_rate(rate: float) -> str:
    return "is as fast as any" if rate >= 1 else f"has {rate:g} of the fastest one's rate"
