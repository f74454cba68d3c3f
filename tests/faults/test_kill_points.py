"""Kill points with real processes: sessions in parts, which pytest's workers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import kill_points, node_kill_points
from tests.process.harness import Zygote

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(400)]

AT_ONCE = 7
"""Sessions of a part."""
# wrong bits are wrong, also when the next try has the right ones
never_again = pytest.mark.flaky(reruns=0)


@never_again
@pytest.mark.parametrize("first", range(0, 56, AT_ONCE))
def test_500_workers_are_killed(zygote: Zygote, tmp_path: Path, first: int) -> None:
    """504 of them: each of the 56 sessions goes on until one of ten workers is left."""
    seeds = range(first, first + AT_ONCE)
    found = kill_points.run_seeds(
        zygote, tmp_path, seeds, kill_points.run_seed, kill_points.__name__
    )
    assert len(found) == AT_ONCE * (kill_points.WORKERS - 1)
    assert sum(each.is_within_a_step for each in found) > len(found) // 4
    assert max(each.seconds for each in found) < 10


@never_again
@pytest.mark.parametrize("first", range(0, 49, AT_ONCE))
def test_147_nodes_are_killed(zygote: Zygote, tmp_path: Path, first: int) -> None:
    """Each of the 49 sessions goes on until one of four nodes is left."""
    seeds = range(first, first + AT_ONCE)
    found = kill_points.run_seeds(
        zygote, tmp_path, seeds, node_kill_points.run_seed, node_kill_points.__name__
    )
    assert len(found) == AT_ONCE * (node_kill_points.WORKERS - 1)
    assert max(each.seconds for each in found) < 10
