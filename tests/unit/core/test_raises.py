"""The raise that is made next is the one that a look at all of them finds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.justenough import AS_GOOD, Raise, Raises

Level = tuple[int, float, float]

seconds = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])
worths = st.sampled_from([0.4, 0.5, 0.99, 1.0, 1.5, 1.99, 2.0, 3.9, 4.0, 64.0, math.inf])
levels = st.lists(st.tuples(seconds, worths), max_size=3, unique_by=lambda each: each[0]).map(
    lambda found: [(place, *each) for place, each in enumerate(sorted(found), 1)]
)
"""A lossier codec saves more."""


def looked_for(of: dict[int, Sequence[Level]], missing_s: float) -> tuple[int, int] | None:
    """The raise, by parameter and level, that `Raises.maybe_best` says it finds."""
    every = [
        (per_loss, saved_s, parameter, level)
        for parameter, own in of.items()
        for level, saved_s, per_loss in own
    ]
    good = [each for each in every if each[0] >= AS_GOOD * max(every)[0]]
    enough = [each for each in good if each[1] >= missing_s]
    if not good:
        return None
    if enough:
        found = min(enough, key=lambda each: (each[1], -each[2]))
    else:
        found = max(good, key=lambda each: (each[1], each[2]))
    return found[2], found[3]


@given(
    st.lists(st.tuples(st.integers(0, 5), levels), min_size=1, max_size=12),
    st.sampled_from([0.1, 0.6, 1.0, 2.5, 9.0]),
)
def test_it_is_the_one_that_a_look_at_all_of_them_finds(
    puts: list[tuple[int, list[Level]]], missing_s: float
) -> None:
    raises, now = Raises(), dict[int, Sequence[Level]]()
    for parameter, own in puts:
        now[parameter] = own
        raises.put(parameter, own)
        best = raises.maybe_best(missing_s)
        found = None if best is None else (best.parameter, best.level)
        assert found == looked_for(now, missing_s)


def test_without_any_there_is_none() -> None:
    raises = Raises()
    assert raises.maybe_best(1.0) is None
    raises.put(3, [(1, 2.0, 1.0)])
    assert raises.maybe_best(1.0) == Raise(2.0, -3, 1, 1.0)
    raises.put(3, [])
    assert raises.maybe_best(1.0) is None
