"""Find the one cost that gives a published figure, by secants."""

from __future__ import annotations

from collections.abc import Callable

_MOST_TRIALS = 12


def fitted(
    step_s: Callable[[float], float], wanted_s: float, *, first: tuple[float, float], within: float
) -> float:
    """The cost with which a step takes ``wanted_s``, to a share of ``within`` of it.

    ``first`` are two costs to begin with, large enough to make a step longer. Raises ValueError if
    the steps do not get nearer.
    """
    before, cost = first
    took_s, now_s = step_s(before), step_s(cost)
    for trials_left in reversed(range(_MOST_TRIALS)):
        if abs(now_s / wanted_s - 1) <= within:
            return cost
        if now_s == took_s or not trials_left:
            break
        slope = (now_s - took_s) / (cost - before)
        before, took_s = cost, now_s
        cost = max(0.0, cost + (wanted_s - now_s) / slope)
        now_s = step_s(cost)
    raise ValueError(f"a step of {wanted_s:.4g} s is not found: {cost:.4g} gives {now_s:.4g} s")
