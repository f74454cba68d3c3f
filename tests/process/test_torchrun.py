"""Under torchrun, as users start it: several workers, several nodes, dedicated servers, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.harness import SCRIPT, Run, free_port, running, torchrun
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


def wait_for(condition: Callable[[], object], run: Run, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.05)


def the_sum(run: Run, ranks: int) -> str:
    """The SHA-256 that all ranks have."""
    results = run.results()
    assert sorted(results) == list(range(ranks)), run.output()
    sums = {result.get("sha256") for result in results.values()}
    assert len(sums) == 1, (results, run.output())
    return str(sums.pop())


@pytest.fixture(scope="module")
def sums() -> dict[str, str]:
    """What earlier tests of this file have found, by number of workers: the bits are the same."""
    return {}


def agree(sums: dict[str, str], workers: int, found: str) -> None:
    assert sums.setdefault(str(workers), found) == found


def test_torchrun_on_one_node(tmp_path: Path, sums: dict[str, str]) -> None:
    """With a rendezvous of its own (--standalone); nothing is left behind at the end."""
    with running(tmp_path) as run:
        run.start(
            torchrun("--standalone", "--nproc-per-node", "4", str(SCRIPT)),
            run.environment(
                Scenario(settings={"link_rate_bits_per_s": 1e9, "workers_per_node": 2})
            ),
        )
        run.wait(60)
        assert run.codes() == [0], run.output()
        agree(sums, 4, the_sum(run, 4))
        assert "4 workers on 2 node(s), 2 server(s)" in run.output()
        run.check_nothing_left()


def test_two_torchruns_as_two_nodes(tmp_path: Path, sums: dict[str, str]) -> None:
    port = free_port()
    with running(tmp_path) as run:
        for node in range(2):
            command = torchrun(
                *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
                *("--master-addr", "127.0.0.1", "--master-port", str(port), str(SCRIPT)),
            )
            run.start(command, run.environment(Scenario()))
        run.wait(60)
        assert run.codes() == [0, 0], run.output()
        agree(sums, 4, the_sum(run, 4))
        assert "4 workers on 2 node(s), 2 server(s)" in run.output()
        run.check_nothing_left()


def server_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "foreprop.cli.main", "server", *arguments]


def test_dedicated_servers_join_by_the_workers_rendezvous(
    tmp_path: Path, sums: dict[str, str]
) -> None:
    """torchrun's default rendezvous is static; two commands together give the two servers."""
    port = free_port()
    scenario = Scenario(settings={"dedicated_servers": 2, "link_rate_bits_per_s": 1e9})
    with running(tmp_path) as run:
        variables = run.environment(scenario)
        for _ in range(2):
            run.start(server_command("--rendezvous", f"127.0.0.1:{port}"), variables)
        run.start(
            torchrun("--nproc-per-node", "4", "--master-port", str(port), str(SCRIPT)), variables
        )
        run.wait(60)
        assert run.codes() == [0, 0, 0], run.output()
        agree(sums, 4, the_sum(run, 4))
        assert "2 server(s) dedicated" in run.output()
        assert run.output().count(" is done") == 2
        run.check_nothing_left()


def test_dedicated_servers_with_torchrun_s_dynamic_rendezvous(tmp_path: Path) -> None:
    """Started late: the workers say where they wait, and for what."""
    scenario = Scenario(settings={"dedicated_servers": 1, "stall_report_s": 0.5})
    with running(tmp_path) as run:
        variables = run.environment(scenario)
        run.start(torchrun("--standalone", "--nproc-per-node", "2", str(SCRIPT)), variables)
        told = r"start `foreprop server --count 1 --rendezvous (\S+:\d+)`"
        wait_for(lambda: re.search(told, run.output()), run)
        match = re.search(told, run.output())
        assert match
        run.start(server_command("--rendezvous", match[1], "--count", "3"), variables)
        run.wait(40)
        assert run.codes() == [0, 0], run.output()
        the_sum(run, 2)
        run.check_nothing_left()


def test_ctrl_c_ends_torchrun_workers_and_dedicated_servers(tmp_path: Path) -> None:
    port = free_port()
    scenario = Scenario(steps=100_000, settings={"dedicated_servers": 1}, pause_s=0.01)
    with running(tmp_path) as run:
        variables = run.environment(scenario)
        command = torchrun("--nproc-per-node", "2", "--master-port", str(port), str(SCRIPT))
        launcher = run.start(command, variables)
        server = run.start(server_command("--rendezvous", f"127.0.0.1:{port}"), variables)
        wait_for(lambda: "2 workers on" in run.output(), run)
        time.sleep(0.5)
        os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
        run.wait(20)
        assert run.exit_codes[launcher.pid] != 0
        assert run.exit_codes[server.pid] == 1, run.output()
        run.check_nothing_left()


def test_ctrl_c_ends_the_servers_beside_the_workers(tmp_path: Path) -> None:
    scenario = Scenario(steps=100_000, pause_s=0.01)
    with running(tmp_path) as run:
        launcher = run.start(
            torchrun("--standalone", "--nproc-per-node", "2", str(SCRIPT)),
            run.environment(scenario),
        )
        wait_for(lambda: "2 workers on" in run.output(), run)
        time.sleep(0.5)
        os.killpg(launcher.pid, signal.SIGINT)
        started_s = time.monotonic()
        run.wait(20)
        assert time.monotonic() - started_s < 8
        assert run.exit_codes[launcher.pid] != 0
        run.check_nothing_left()


def test_torchrun_restarts_a_failed_script(tmp_path: Path) -> None:
    """The second attempt meets in the same store, and must not find the first one's servers."""
    scenario = Scenario(raise_at={"1": 3}, only_first_attempt=True)
    with running(tmp_path) as run:
        command = torchrun(
            *("--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"),
            *("--master-port", str(free_port()), str(SCRIPT)),
        )
        run.start(command, run.environment(scenario))
        run.wait(60)
        assert run.codes() == [0], run.output()
        assert run.output().count("2 workers on") == 2
        the_sum(run, 2)
        run.check_nothing_left()


def test_a_script_that_fails_on_one_rank_fails_torchrun(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        command = torchrun("--standalone", "--nproc-per-node", "2", str(SCRIPT))
        run.start(command, run.environment(Scenario(steps=1000, pause_s=0.01, raise_at={"1": 3})))
        run.wait(60)
        assert run.codes() != [0]
        assert "ValueError: the data are odd" in run.output()
        run.check_nothing_left()
