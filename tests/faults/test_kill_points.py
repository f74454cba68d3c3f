"""Kill points with real processes: sessions in parts, which pytest's workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import kill_points, node_kill_points
from tests.process.harness import Zygote

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(400)]

AT_ONCE = 7
"""Sessions of a part."""
SESSIONS: list[tuple[Any, int]] = [(kill_points, 56), (node_kill_points, 49)]
"""Of ten workers and of four nodes, until one is left: 504 workers and 147 nodes are killed."""
PARTS = [
    pytest.param(points, first, id=f"{points.__name__.rpartition('.')[2]}-{first}")
    for points, sessions in SESSIONS
    for first in range(0, sessions, AT_ONCE)
]


@pytest.mark.flaky(reruns=0)  # wrong bits are wrong, also when the next try has the right ones
@pytest.mark.parametrize(("points", "first"), PARTS)
def test_all_but_one_are_killed(zygote: Zygote, tmp_path: Path, points: Any, first: int) -> None:
    seeds = range(first, first + AT_ONCE)
    found = kill_points.run_seeds(zygote, tmp_path, seeds, points.run_seed, points.__name__)
    assert len(found) == AT_ONCE * (points.WORKERS - 1)
    if points is kill_points:
        assert sum(each.is_within_a_step for each in found) > len(found) // 4
    assert max(each.seconds for each in found) < 10
