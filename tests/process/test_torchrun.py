"""Under torchrun, as users start it: several workers, several nodes, dedicated servers, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from foreprop.tools.run.host import free_port
from tests.process.harness import Run, Zygote, running, wait_for
from tests.process.train_script import Scenario
from tests.tiers import long_cases

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


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


@pytest.mark.parametrize("ranks", [2, *long_cases(3)])
def test_torchrun_on_one_node(zygote: Zygote, tmp_path: Path, ranks: int) -> None:
    """With a rendezvous of its own (--standalone), two emulated nodes and paced links.

    Servers (and the relay, of three ranks) are forked.
    """
    with running(tmp_path) as run:
        settings = {"link_rate_bits_per_s": 1e9, "workers_per_node": ranks - 1}
        variables = run.environment(Scenario(settings=settings), FORK_SERVERS=str(ranks - 1))
        run.torchrun(zygote, variables, "--standalone", "--nproc-per-node", str(ranks))
        run.wait()
        assert run.codes() == [0], run.output()
        the_sum(run, ranks)
        assert f"{ranks} workers on 2 nodes, 2 servers" in run.output()
        run.check_nothing_left()


@pytest.mark.long
def test_two_torchruns_as_two_nodes(zygote: Zygote, tmp_path: Path, sums: dict[str, str]) -> None:
    where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    with running(tmp_path) as run:
        for node in range(2):
            nodes = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1")
            run.torchrun(zygote, run.environment(Scenario()), *nodes, *where)
        run.wait()
        assert run.codes() == [0, 0], run.output()
        agree(sums, 2, the_sum(run, 2))
        assert "2 workers on 2 nodes, 2 servers" in run.output()
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("compression", [None, "lossless"])
def test_dedicated_servers_join_by_the_workers_rendezvous(
    zygote: Zygote, tmp_path: Path, sums: dict[str, str], compression: str | None
) -> None:
    """torchrun's default rendezvous is static; two commands together give the two servers."""
    port = str(free_port())
    settings = {"dedicated_servers": 2, "link_rate_bits_per_s": 1e9, "compression": compression}
    scenario = Scenario(settings=settings)
    with running(tmp_path) as run:
        variables = run.environment(scenario)
        for _ in range(2):
            run.foreprop(zygote, variables, "server", "--rendezvous", f"127.0.0.1:{port}")
        run.torchrun(zygote, variables, "--nproc-per-node", "2", "--master-port", port)
        run.wait()
        assert run.codes() == [0, 0, 0], run.output()
        agree(sums, 2, the_sum(run, 2))
        assert "2 servers dedicated" in run.output()
        assert run.output().count(" is done") == 2
        run.check_nothing_left()


@pytest.mark.long
def test_dedicated_servers_with_torchrun_s_dynamic_rendezvous(
    zygote: Zygote, tmp_path: Path, sums: dict[str, str]
) -> None:
    """Started late: the workers say where they wait, and for what."""
    scenario = Scenario(settings={"dedicated_servers": 1, "stall_report_s": 0.5})
    with running(tmp_path) as run:
        variables = run.environment(scenario)
        run.torchrun(zygote, variables, "--standalone", "--nproc-per-node", "2")
        told = r"start `foreprop (server --count 1 --rendezvous \S+:\d+)`"
        wait_for(lambda: re.search(told, run.output()), run)
        command = re.search(told, run.output())
        assert command
        run.foreprop(zygote, variables, *command[1].split())
        run.wait()
        assert run.codes() == [0, 0], run.output()
        agree(sums, 2, the_sum(run, 2))
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("dedicated", [False, True])
def test_ctrl_c_ends_everything(zygote: Zygote, tmp_path: Path, dedicated: bool) -> None:
    """By themselves, in the middle of the training: torchrun does not have to kill anything."""
    port = str(free_port())
    settings = {"log_steps": 5, **({"dedicated_servers": 1} if dedicated else {})}
    scenario = Scenario(steps=100_000, settings=settings, pause_s=0.01)
    with running(tmp_path) as run:
        variables = run.environment(scenario)
        command = ("--nproc-per-node", "2", "--master-port", port)
        launcher = run.torchrun(zygote, variables, *command)
        if dedicated:
            run.foreprop(zygote, variables, "server", "--rendezvous", f"127.0.0.1:{port}")
        wait_for(lambda: ": step " in run.output(), run)
        os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
        run.wait()
        assert 0 not in run.codes(), run.output()
        assert "forcefully exiting" not in run.output()
        run.check_nothing_left()


@pytest.mark.long
def test_torchrun_restarts_a_failed_script(zygote: Zygote, tmp_path: Path) -> None:
    """The second attempt meets in the same store, and must not find the first one's servers."""
    scenario = Scenario(raise_at={"1": 3}, only_first_attempt=True, late_s={"0": 1.0})
    with running(tmp_path) as run:
        variables = run.environment(scenario)
        again = ("--max-restarts", "1", "--master-port", str(free_port()))
        run.torchrun(zygote, variables, "--nproc-per-node", "2", *again)
        run.wait()
        assert run.codes() == [0], run.output()
        assert "ValueError: the data are odd" in run.output()
        assert run.output().count("2 workers on") == 2
        the_sum(run, 2)
        run.check_nothing_left()


@pytest.mark.long
def test_a_script_that_fails_on_one_rank_fails_torchrun(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        variables = run.environment(Scenario(steps=1000, pause_s=0.01, raise_at={"1": 3}))
        run.torchrun(zygote, variables, "--standalone", "--nproc-per-node", "2")
        run.wait()
        assert run.codes() != [0]
        assert "ValueError: the data are odd" in run.output()
        run.check_nothing_left()
