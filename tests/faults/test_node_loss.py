"""A node's worker and server are killed, as real processes: the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.node_kill_points import check, plan_of, run_plan, start
from tests.process.elastic_script import Plan
from tests.process.harness import Zygote, free_port, running

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("seed", "deaths"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.long)])
def test_nodes_are_killed_at_any_moment(
    zygote: Zygote, tmp_path: Path, seed: int, deaths: int
) -> None:
    found = run_plan(zygote, tmp_path, plan_of(seed, deaths))
    assert len(found) == deaths
    assert max(each.seconds for each in found) < 10


@pytest.mark.long
def test_rank_0_dies_with_the_rendezvous_store(zygote: Zygote, tmp_path: Path) -> None:
    """Without torchrun it is in rank 0's process. Nobody needs it once the session runs."""
    plan = Plan(steps=12, pause_s=0.01, deaths={"0": (5, 0.005)})
    with running(tmp_path) as run:
        start(run, zygote, plan, free_port(), own_store=True)
        run.wait(60)
        check(run, plan)
        run.check_nothing_left()
