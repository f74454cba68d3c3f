"""Of matrices: which cases `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

from foreprop import PRESETS
from tests.tiers import long_cases

PROTOCOLS = ["kvstore", "tensorflow"]
PROTOCOLS += long_cases(*(preset for preset in PRESETS if preset not in PROTOCOLS))
"""Presets: other kinds of reply than the usual one. `test_same_bits` has all in `make test`."""

Case = tuple[int, ...]


def few(*axes: Iterable[Any], size: int = 1) -> list[Any]:
    """All combinations of values, `long` but for so few that each value is in one of the others.

    With ``size`` 2 each pair of values is. What is marked `long` by itself counts for nothing.
    """
    values = [
        [value if hasattr(value, "marks") else pytest.param(value) for value in axis]
        for axis in axes
    ]
    cases = list(product(*(range(len(axis)) for axis in values)))
    marks = {
        case: [m for v, i in zip(values, case, strict=True) for m in v[i].marks] for case in cases
    }
    usual = [case for case in cases if all(mark.name != "long" for mark in marks[case])]
    chosen = _cover(usual, size)
    return [
        pytest.param(
            *(axis[i].values[0] for axis, i in zip(values, case, strict=True)),
            marks=[*marks[case], *([] if case in chosen else [pytest.mark.long])],
        )
        for case in cases
    ]


def _cover(cases: list[Case], size: int) -> set[Case]:
    """Greedily; of those that are as good the one with the most new pairs."""
    chosen: set[Case] = set()
    missing = {part for case in cases for part in combinations(enumerate(case), size)}
    pairs = {part for case in cases for part in combinations(enumerate(case), 2)}
    while missing:
        best = max(
            cases,
            key=lambda case: (
                len(missing.intersection(combinations(enumerate(case), size))),
                len(pairs.intersection(combinations(enumerate(case), 2))),
            ),
        )
        chosen.add(best)
        missing.difference_update(combinations(enumerate(best), size))
        pairs.difference_update(combinations(enumerate(best), 2))
    return chosen
