"""Two nodes of two workers: who dies is named by all others, and nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.conformance.parity import servers_only
from tests.faults.faults import EventInjector, Phase
from tests.faults.lost_peers import Soon, check_told, ranks, scenario
from tests.process.harness import Zygote, workers
from tests.tiers import long_cases

pytestmark = [pytest.mark.process, servers_only]

NODE_1 = r"node 1 \(ranks 2, 3\) is gone"


@pytest.mark.long
@pytest.mark.parametrize("size", ["words", "small"])
@pytest.mark.parametrize("phase", ["backward", "forward"])
def test_a_killed_worker_is_named_on_both_nodes(
    zygote: Zygote, tmp_path: Path, phase: Phase, size: str, soon: Soon
) -> None:
    injector = EventInjector(tmp_path).at(rank=3, step=3, phase=phase).kill()
    with ranks(zygote, tmp_path, 4, scenario(injector, size=size), local_size=2, fork=2) as run:
        run.wait()
        fault = injector.only_fault(run)
        assert run.codes()[3] == -signal.SIGKILL
        check_told(run, fault["at_s"], [0, 1, 2], "rank 3 is gone.*relay of node 1 closed", soon)
        run.check_nothing_left()


@pytest.mark.long
def test_a_worker_that_takes_its_server_and_relay_with_it(
    zygote: Zygote, tmp_path: Path, soon: Soon
) -> None:
    injector = EventInjector(tmp_path).at(rank=2, step=3, phase="backward").kill()
    with ranks(zygote, tmp_path, 4, scenario(injector), local_size=2, fork=2) as run:
        run.wait()
        fault = injector.only_fault(run)
        names = rf"{NODE_1}|rank 2 is gone|\(beside rank 2\) (to server \d )?is gone"
        check_told(run, fault["at_s"], [0, 1, 3], names, soon)
        run.check_nothing_left()


@pytest.mark.parametrize("phase", ["forward", *long_cases("backward")])
def test_a_killed_relay_is_named(zygote: Zygote, tmp_path: Path, phase: Phase, soon: Soon) -> None:
    injector = EventInjector(tmp_path).at(rank=2, step=3, phase=phase).kill_relay()
    with ranks(zygote, tmp_path, 4, scenario(injector), local_size=2, fork=2) as run:
        run.wait()
        fault = injector.only_fault(run)
        names = rf"{NODE_1}|the relay of node 1 \(beside rank 2\) to server \d is gone"
        check_told(run, fault["at_s"], [0, 1, 2, 3], names, soon)
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_killed_server_is_named(zygote: Zygote, tmp_path: Path, phase: Phase, soon: Soon) -> None:
    injector = EventInjector(tmp_path).at(rank=2, step=3, phase=phase).kill_server()
    with ranks(zygote, tmp_path, 4, scenario(injector), local_size=2, fork=2) as run:
        run.wait()
        fault = injector.only_fault(run)
        check_told(run, fault["at_s"], [0, 1, 2, 3], r"server 1 \(beside rank 2\) is gone", soon)
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.alone
def test_a_stopped_worker_is_named(zygote: Zygote, tmp_path: Path) -> None:
    injector = EventInjector(tmp_path).at(rank=3, step=3, phase="backward").stop()
    told = scenario(injector, settings={"step_timeout_s": 4.0, "stall_report_s": 1.0})
    with ranks(zygote, tmp_path, 4, told, local_size=2, fork=2) as run:
        run.wait(but=[run.started[3]])
        injector.only_fault(run)
        results = run.results()
        assert {results[rank]["error"] for rank in (0, 1, 2)} == {"StepTimeout"}
        assert "waits for the push of rank 3" in run.output()  # the relay of its node knows
        assert "waits for the push of node 1 (ranks 2, 3)" in results[0]["message"]


@pytest.mark.long
def test_all_ends_well_without_faults(zygote: Zygote, tmp_path: Path) -> None:
    told = scenario(EventInjector(tmp_path), steps=6, pause_s=0.0)
    with workers(zygote, tmp_path, 4, told, local_size=2) as run:
        run.wait()
        assert run.codes() == [0] * 4, run.output()
        assert len({result["sha256"] for result in run.results().values()}) == 1
        assert "local aggregation" in run.output()
        run.check_nothing_left()
