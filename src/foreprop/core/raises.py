"""Which parameter to raise to a lossier codec next: what buys most seconds per loss.

Theory of operation. Raises are kept by the octave of what they buy per loss, and within each by the
seconds that they save. Those that are half as good as the best one, or better, are then all of its
octave, and some of the octave below. So of thousands of parameters one is found at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple, TypeVar

AS_GOOD = 0.5
"""Raises that buy at least this share of the best one's seconds per loss are as good."""
_ENDLESS = 1 << 20
"""The octave of what loses nothing."""


T = TypeVar("T", "Raise", float)


class Raise(NamedTuple):
    """In the order of what it saves; of equals the later parameter comes first."""

    saved_s: float
    minus_parameter: int
    level: int
    per_loss: float

    @property
    def parameter(self) -> int:
        return -self.minus_parameter


_saved_s = attrgetter("saved_s")


class Raises:
    """Those that are possible now. Not thread-safe."""

    def __init__(self) -> None:
        self._octaves: dict[int, list[Raise]] = {}
        self._worths: dict[int, list[float]] = {}
        """What each of an octave buys per loss, rising."""
        self._own: dict[int, list[Raise]] = {}
        """By parameter."""

    def put(self, parameter: int, levels: Iterable[tuple[int, float, float]]) -> None:
        """From now on the parameter's are these: level, seconds saved, and those per loss."""
        for each in self._own.pop(parameter, ()):
            octave = _octave_of(each)
            _remove(self._octaves, octave, each)
            _remove(self._worths, octave, each.per_loss)
        self._own[parameter] = own = [
            Raise(saved_s, -parameter, level, per_loss) for level, saved_s, per_loss in levels
        ]
        for each in own:
            octave = _octave_of(each)
            insort(self._octaves.setdefault(octave, []), each)
            insort(self._worths.setdefault(octave, []), each.per_loss)

    def maybe_best(self, missing_s: float) -> Raise | None:
        """Of those that are as good as the best one the smallest that is enough, or the largest."""
        if not self._octaves:
            return None
        octave = max(self._octaves)
        least = AS_GOOD * self._worths[octave][-1]
        lower = self._octaves.get(octave - 1, [])
        both = [self._octaves[octave], lower]
        enough = [each for kept in both for each in _smallest(kept, missing_s, least)]
        if enough:
            return min(enough)
        largest = [each for kept in both for each in _largest(kept, least)]
        return max(largest, key=lambda each: (each.saved_s, each.parameter))


def _octave_of(each: Raise) -> int:
    return _ENDLESS if each.per_loss == math.inf else math.frexp(each.per_loss)[1]


def _remove(by_octave: dict[int, list[T]], octave: int, value: T) -> None:
    kept = by_octave[octave]
    del kept[bisect_left(kept, value)]
    if not kept:
        del by_octave[octave]


def _smallest(kept: list[Raise], missing_s: float, least: float) -> list[Raise]:
    """The first one that saves so much and is good enough, or none."""
    for place in range(bisect_left(kept, missing_s, key=_saved_s), len(kept)):
        if kept[place].per_loss >= least:
            return [kept[place]]
    return []


def _largest(kept: list[Raise], least: float) -> list[Raise]:
    """The one that saves most, of equals the latest parameter's, or none."""
    end = len(kept)
    while end:
        start = bisect_left(kept, kept[end - 1].saved_s, key=_saved_s)
        for place in range(start, end):
            if kept[place].per_loss >= least:
                return [kept[place]]
        end = start
    return []
