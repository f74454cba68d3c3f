"""Workers and servers that do not die but fall silent: SIGSTOP, and an unplugged cable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from foreprop.tools.run.host import free_port
from tests.faults.cables import cables
from tests.faults.faults import EventInjector
from tests.faults.lost_peers import Soon, check_place, ranks
from tests.process.harness import Run, Zygote, running
from tests.process.train_script import Scenario

pytestmark = pytest.mark.process

TIMEOUT_S, LONGER_S = 3.0, 5.0
"""Beside other programs a step may take seconds, and nobody is to be lost for that."""
MARGIN_S = 3.0
MEASURED = [pytest.mark.long, pytest.mark.alone]


def scenario(injector: EventInjector, timeout_s: float = TIMEOUT_S, **more: Any) -> Scenario:
    settings = {"step_timeout_s": timeout_s, "stall_report_s": 0.7}
    faults = tuple(injector.plan)
    return Scenario(
        **{"steps": 100, "pause_s": 0.02, "settings": settings, "faults": faults, **more}
    )


def check_timed_out(run: Run, since_s: float, survivors: list[int], names: str, soon: Soon) -> None:
    results = run.results()
    for rank in survivors:
        result = results[rank]
        assert result.get("error") in {"StepTimeout", "PeerLost"}, (
            f"{rank}: {result}\n{run.output()}"
        )
        assert soon(result["at_s"] - since_s, TIMEOUT_S + MARGIN_S), f"rank {rank}: {result}"
        assert re.search(names, result["message"]), f"rank {rank}: {result}\n{run.output()}"
        check_place(result["message"])


def check_stall_was_reported(run: Run, what: str) -> None:
    """On standard error, by the process that waits: rank, parameter, stage, step and for whom."""
    report = r"foreprop: rank (\d) for \d+ s waits for parameter [02]\.\w+, step \d+, stage \w+: .*"
    found = [match[0] for match in re.finditer(report, run.output())]
    assert any(re.search(what, line) for line in found), (found, run.output())
    assert (
        re.search(r"foreprop: server \d+, step \d+: for \d+ s ", run.output()) or "server" in what
    )


@pytest.mark.parametrize(
    ("size", "phase", "timeout_s"),
    [
        ("small", "backward", LONGER_S),
        pytest.param("small", "backward", TIMEOUT_S, marks=MEASURED),
        pytest.param("large", "between", TIMEOUT_S, marks=MEASURED),
    ],
)
def test_a_stopped_worker_is_named_after_the_timeout(
    zygote: Zygote, tmp_path: Path, size: str, phase: Any, timeout_s: float, soon: Soon
) -> None:
    """Large: the server blocks in the middle of its reply to the stopped worker."""
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase=phase).stop()
    told = scenario(injector, timeout_s, size=size)
    with ranks(zygote, tmp_path, 3, told, local_size=3, fork=1) as run:
        stopped = run.started[1]
        run.wait(but=[stopped])
        fault = injector.only_fault(run)
        assert stopped.status() == psutil.STATUS_STOPPED
        check_timed_out(run, fault["at_s"], [0, 2], r"rank 1\b", soon)
        check_stall_was_reported(run, r"rank 1\b")
        if size == "large":
            stopped.kill()  # as torchrun ends what does not end by itself
        else:
            stopped.resume()
        run.wait()
        if size == "small":  # it has been told meanwhile
            assert run.results()[1]["error"] in {"StepTimeout", "PeerLost"}
        run.check_nothing_left()


@pytest.mark.parametrize(
    ("size", "timeout_s"),
    [("small", LONGER_S), pytest.param("large", TIMEOUT_S, marks=MEASURED)],
)
def test_a_stopped_server_is_named_and_ended_by_its_worker(
    zygote: Zygote, tmp_path: Path, size: str, timeout_s: float, soon: Soon
) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase="forward").stop_server()
    as_process = scenario(injector, timeout_s, size=size)
    as_process.settings["plane"] = "python"
    with ranks(zygote, tmp_path, 2, as_process, fork=1) as run:
        run.wait()
        fault = injector.only_fault(run)
        check_timed_out(run, fault["at_s"], [0, 1], r"server 1 \(beside rank 1\)", soon)
        check_stall_was_reported(run, r"server 1 \(beside rank 1\) has not answered")
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.alone
def test_a_stopped_server_ends_when_its_worker_is_killed(
    zygote: Zygote, tmp_path: Path, soon: Soon
) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=3).stop_server_and_die()
    as_process = scenario(injector)
    as_process.settings["plane"] = "python"
    with ranks(zygote, tmp_path, 2, as_process, fork=1) as run:
        run.wait()
        fault = injector.only_fault(run)
        check_timed_out(run, fault["at_s"], [0], r"rank 1\b|server 1\b", soon)
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.lab
def test_an_unplugged_node_is_named_by_the_others(
    zygote: Zygote, tmp_path: Path, soon: Soon
) -> None:
    """No packet comes or goes any more, and nobody says so: node 1 holds a worker and a server."""
    with cables(2) as net, running(tmp_path) as run:
        point = EventInjector(tmp_path).at(rank=1, step=3, phase="between")
        injector = point.unplug(cable=f"/run/netns/{net.switch} port1")
        port = free_port()
        for rank, node in enumerate(net.nodes):
            told = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.231.77.1",
                "MASTER_PORT": str(port),
            }
            variables = run.environment(scenario(injector), **told)
            run.start(zygote, variables, netns=f"/run/netns/{node}")
        run.wait()
        fault = injector.only_fault(run)
        check_timed_out(run, fault["at_s"], [0], r"rank 1\b|server 1\b", soon)
        check_timed_out(run, fault["at_s"], [1], r"rank 0\b|server 0\b", soon)
        run.check_nothing_left()
