"""A quorum: which members may go on without the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from foreprop.core.membership import is_quorum


@pytest.mark.parametrize(
    ("some", "of", "dead", "may"),
    [
        ((0, 1), (0, 1, 2), (), True),
        ((1, 2), (0, 1, 2), (), True),
        ((0,), (0, 1, 2), (1,), True),
        ((2,), (0, 1, 2), (1,), False),
        ((2,), (0, 1, 2), (0, 1), True),
        ((0,), (0, 1), (), True),
        ((1,), (0, 1), (), False),
        ((1,), (0, 1), (0,), True),
        ((2, 3), (0, 1, 2, 3), (1,), True),
        ((2, 3), (0, 1, 2, 3), (), False),
        ((0, 3), (0, 1, 2, 3), (), True),
        ((), (0, 1), (0, 1), False),
        ((5, 6), (0, 1), (0, 1), False),
    ],
)
def test_a_quorum(some: Any, of: Any, dead: Any, may: bool) -> None:
    assert is_quorum(some, of, dead) == may


def test_two_quorums_have_a_member_in_common_or_one_is_wrong_about_who_is_dead() -> None:
    everybody = range(5)
    sets = [set(s) for n in range(1, 6) for s in itertools.combinations(everybody, n)]
    for dead in [set(), *sets]:  # as both know it: a refused connection is the same for all
        for one, other in itertools.product(sets, sets):
            if is_quorum(one, everybody, dead) and is_quorum(other, everybody, dead):
                assert one & other
