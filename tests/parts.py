"""Parts of `make test-all`, for CI: `make test-all PART=2/3` runs the second of three.

They are about as dear as each other by the record (tests/costs.py).

    python -m tests.parts 300 1800 COMMIT     # how large a part ends in 1800 s, and which one
                                              # it is, where `make test` took 300 s
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tests.costs import read_record

NOT_RECORDED_S = 1.0
"""What a test costs that the record does not have."""


class Part(NamedTuple):
    """The ``number``-th, from 1, of as many parts as there are."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        try:
            part = cls(*map(int, text.split("/")))
        except (TypeError, ValueError):
            part = cls(0, 0)
        if not 1 <= part.number <= part.count:
            raise pytest.UsageError(f"--part {text}: give two numbers, such as 1/3 for a third")
        return part

    def names(self, costs_s: Mapping[str, float]) -> set[str]:
        """Of what it costs to run each: those that are in this part, always the same ones."""
        parts: list[tuple[float, set[str]]] = [(0.0, set()) for _ in range(self.count)]
        for name, cost_s in sorted(costs_s.items(), key=lambda item: (-item[1], item[0])):
            least = min(range(self.count), key=lambda index: parts[index][0])
            sum_s, names = parts[least]
            names.add(name)
            parts[least] = (sum_s + cost_s, names)
        return parts[self.number - 1][1]


def part_that_fits(default_s: float, left_s: float, commit: str) -> Part:
    """The largest part of `make test-all` that ends in time, by how long `make test` took.

    The record has the processor's seconds of both, on another machine. What runs alone mostly
    waits, which takes as long everywhere. The commit's hash picks among the parts.
    """
    cpu_s: Counter[str] = Counter()
    alone_s = 0.0
    for cost in read_record():
        cpu_s[cost.tier] += cost.cpu_s
        alone_s += cost.wall_s * (cost.tier == "alone")
    all_s = default_s * (cpu_s["all"] + cpu_s["ring"]) / max(cpu_s["default"], 1.0) + alone_s
    count = math.ceil(max(1.0, all_s / max(left_s, 60.0)))
    return Part(int(commit, 16) % count + 1, count)


def deselect_others(
    part: Part, items: list[pytest.Item], costs_s: Mapping[str, float]
) -> list[pytest.Item]:
    """Leave a part of the tests in `items`, each with all of its cases; returns the others."""
    of_tests = [item.nodeid.partition("[")[0] for item in items]
    chosen = part.names({test: costs_s.get(test, NOT_RECORDED_S) for test in of_tests})
    others = [item for item, test in zip(items, of_tests, strict=True) if test not in chosen]
    items[:] = [item for item, test in zip(items, of_tests, strict=True) if test in chosen]
    return others


if __name__ == "__main__":
    took_s, remaining_s, head = sys.argv[1:]
    print("/".join(map(str, part_that_fits(float(took_s), float(remaining_s), head))))
