"""Nodes are killed, worker and server, as real processes: the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreprop.tools.run.host import free_port
from tests.faults.kill_points import check, survived
from tests.faults.node_kill_points import WORKERS, start
from tests.process.elastic_script import Plan
from tests.process.harness import Zygote, running

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(150)]


def test_three_of_four_nodes_die_first_rank_0_with_the_rendezvous_store(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Without torchrun the store is in rank 0's process. Nobody needs it in a running session."""
    plan = Plan(steps=22, deaths={"0": (5, 2, 0.001), "2": (10, 4, 0.0), "1": (16, 0, 0.005)})
    with running(tmp_path) as run:
        start(run, zygote, plan, free_port(), own_store=True)
        run.wait(90)
        check(run, plan, WORKERS, WORKERS)
        run.check_nothing_left()
        assert max(survived(run, rank).seconds for rank in plan.victims) < 10
