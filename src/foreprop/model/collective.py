"""When all-reduces end that share the links of a ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_ROUNDING = 1e-9
"""Seconds, and shares of a collective, that are as good as none."""


class Collective(NamedTuple):
    """One all-reduce, or what else passes every link alike."""

    ready_s: float
    link_s: float
    """How long it would have every link busy."""
    least_s: float
    """How long it takes with the links to itself: rounds that wait for each other."""
    elems: int


def ends_s(
    collectives: Sequence[Collective], *, in_flight: int, in_flight_elems: int | None = None
) -> list[float]:
    """When each is done. They are issued in the order given, each when it is ready.

    At most ``in_flight``, and unless it is one ``in_flight_elems``, are under way; those share the
    links evenly.
    """
    ended = [0.0] * len(collectives)
    left: dict[int, float] = {}  # share of those under way that is not done, by number
    now_s, following = 0.0, 0
    while following < len(collectives) or left:
        while following < len(collectives) and collectives[following].ready_s <= now_s:
            elems = sum(collectives[number].elems for number in left)
            too_many = elems + collectives[following].elems > (in_flight_elems or math.inf)
            if len(left) >= in_flight or (left and too_many):
                break
            left[following] = 1.0
            following += 1
        takes_s = _durations({number: collectives[number] for number in left})
        due_s = {number: now_s + left[number] * takes_s[number] for number in left}
        until_s = min(due_s.values(), default=math.inf)
        if following < len(collectives) and collectives[following].ready_s > now_s:
            until_s = min(until_s, collectives[following].ready_s)
        for number in list(left):
            left[number] -= (until_s - now_s) / takes_s[number]
            # What is left may take less than the clock's last digit.
            if left[number] <= _ROUNDING or due_s[number] <= until_s:
                ended[number] = until_s
                del left[number]
        now_s = until_s
    return ended


def _durations(under_way: dict[int, Collective]) -> dict[int, float]:
    """How long each would take from beginning to end if it went on as it does now.

    They get even shares of the links, but none more than it can use.
    """
    most = {n: c.link_s / _least_s(c) for n, c in under_way.items()}
    durations: dict[int, float] = {}
    rest = 1.0
    for place, number in enumerate(sorted(most, key=most.__getitem__)):
        share = min(most[number], rest / (len(most) - place))
        rest -= share
        collective = under_way[number]
        durations[number] = max(collective.link_s / share if share else 0.0, _least_s(collective))
    return durations


def _least_s(collective: Collective) -> float:
    return max(collective.least_s, collective.link_s, _ROUNDING)
