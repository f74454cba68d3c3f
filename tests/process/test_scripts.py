"""Ordinary and not so ordinary ends of a script, without a launcher that would cover them up."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from foreprop.backends.processes import PROGRAM
from tests.process.harness import Zygote, running, wait_for, workers
from tests.process.train_script import SIZES, Scenario

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def trained_plainly(steps: int) -> str:
    """What train_script.py does, without foreprop."""
    torch.manual_seed(0)
    size_in, hidden, size_out = SIZES["small"]
    model = nn.Sequential(nn.Linear(size_in, hidden), nn.ReLU(), nn.Linear(hidden, size_out))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = TensorDataset(torch.randn(512, size_in), torch.randn(512, size_out))
    for _, (x, y) in zip(range(steps), DataLoader(data, batch_size=4), strict=False):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


def test_a_script_started_plainly_is_plain_torch(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        scenario = Scenario(shuffle=False)
        run.start(zygote, run.environment(scenario))
        run.wait()
        assert run.codes() == [0], run.output()
        assert run.results()[0]["sha256"] == trained_plainly(scenario.steps)
        run.check_nothing_left()


def test_dedicated_servers_need_a_rendezvous(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.start(zygote, run.environment(Scenario(settings={"dedicated_servers": 2})))
        run.wait()
        result = run.results()[0]
        assert result["error"] == "ConfigError"
        assert "start the script with torchrun" in result["message"]


def test_exit_while_a_data_loader_s_workers_live(zygote: Zygote, tmp_path: Path) -> None:
    """They were forked with our descriptors open, and must keep neither server nor peers alive."""
    scenario = Scenario(loader_workers=2, keep_loader=True)
    with workers(zygote, tmp_path, 2, scenario, fork=1) as run:
        run.wait()
        assert run.codes() == [0, 0], run.output()
        assert len({result["sha256"] for result in run.results().values()}) == 1
        run.check_nothing_left()


def test_ctrl_c_in_the_middle_ends_ranks_and_their_server(zygote: Zygote, tmp_path: Path) -> None:
    scenario = Scenario(steps=100_000, settings={"log_steps": 5}, pause_s=0.01)
    with workers(zygote, tmp_path, 2, scenario, local_size=2, fork=1) as run:
        wait_for(lambda: ": step " in run.output(), run)
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):  # all at once
            for rank in run.started:
                os.killpg(rank.pid, number)
        run.wait()
        assert 0 not in run.codes(), run.output()
        errors = [result["error"] for result in run.results().values()]
        assert len(errors) == 2
        assert {"KeyboardInterrupt"} <= set(errors) <= {"KeyboardInterrupt", "PeerLost"}
        run.check_nothing_left()


@pytest.mark.alone
def test_a_worker_killed_while_its_data_loader_s_workers_live(
    zygote: Zygote, tmp_path: Path
) -> None:
    """The others must hear of it although forked children of the dead worker go on for a while."""
    scenario = Scenario(steps=1000, pause_s=0.01, loader_workers=1, die_at={"1": 3})
    with workers(zygote, tmp_path, 2, scenario, local_size=2, fork=1) as run:
        run.wait()
        result = run.results()[0]
        assert result["error"] == "PeerLost", run.output()
        assert "rank 1 is gone" in result["message"]
        assert result["at_s"] - run.results()[1]["at_s"] < 5
        run.check_nothing_left(within_s=60)  # torch's loader looks after its parent every 5 s


def test_servers_are_not_ended_by_who_ends_all_processes(zygote: Zygote, tmp_path: Path) -> None:
    """Slurm's scancel sends SIGTERM to servers, too, whose workers may want to save first."""
    scenario = Scenario(steps=40, pause_s=0.02)
    with workers(zygote, tmp_path, 2, scenario, fork=1) as run:
        wait_for(lambda: "2 servers" in run.output(), run)
        beside = [process for process in run.ours() if process not in run.started]
        assert len(beside) == 4  # each rank's server, and the process that answers for the rank
        for process in beside:
            process.terminate()
        run.wait()
        assert run.codes() == [0, 0], run.output()
        run.check_nothing_left()


@pytest.mark.long
def test_files_of_the_user_s_are_not_the_server_s(tmp_path: Path) -> None:
    for name in ("random", "json", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the user')")
    done = subprocess.run(
        [*PROGRAM, "no socket"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "invalid literal for int() with base 10: 'no socket'" in done.stderr


def test_an_error_on_one_rank_is_told_to_all(zygote: Zygote, tmp_path: Path) -> None:
    scenario = Scenario(steps=1000, pause_s=0.01, raise_at={"1": 3})
    with workers(zygote, tmp_path, 3, scenario, local_size=3, fork=1) as run:
        run.wait()
        results = run.results()
        assert results[1]["error"] == "ValueError"
        for rank in (0, 2):
            assert results[rank]["error"] == "PeerLost", run.output()
            assert results[rank]["message"] == "rank 1 ended: ValueError: the data are odd"
        assert 0 not in run.codes()
        run.check_nothing_left()


def test_ranks_that_make_different_numbers_of_steps(zygote: Zygote, tmp_path: Path) -> None:
    scenario = Scenario(steps=8, pause_s=0.01, leave_at={"1": 5})
    with workers(zygote, tmp_path, 3, scenario, local_size=3, fork=1) as run:
        run.wait()
        results = run.results()
        assert "sha256" in results[1], run.output()
        for rank in (0, 2):
            assert results[rank]["error"] == "PeerLost"
            assert "rank 1 has left the session" in results[rank]["message"]
            assert "same number of steps" in results[rank]["message"]
        run.check_nothing_left()


@pytest.mark.parametrize("architecture", ["p2p", "ring", "hybrid"])
def test_ranks_may_end_at_different_times(
    zygote: Zygote, tmp_path: Path, architecture: str
) -> None:
    """Rank 0 owns the only server and is done first; rank 1 still reads its parameters."""
    size = "words" if architecture == "hybrid" else "small"
    settings = {"architecture": architecture}
    scenario = Scenario(steps=3, size=size, settings=settings, linger_s={"1": 1.5})
    with workers(zygote, tmp_path, 2, scenario, local_size=2, fork=1) as run:
        run.wait()
        assert run.codes() == [0, 0], run.output()
        assert len({result["sha256"] for result in run.results().values()}) == 1
        run.check_nothing_left()
