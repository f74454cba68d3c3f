"""Workers and servers that die: everybody else says who it was, where, and soon."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.faults import EventInjector, Phase
from tests.faults.lost_peers import STEPS, TOLD_WITHIN_S, Soon, check_told, ranks, scenario
from tests.process.harness import Zygote, workers
from tests.process.train_script import Scenario
from tests.tiers import long_cases

pytestmark = pytest.mark.process


@pytest.mark.parametrize("phase", ["backward", *long_cases("forward", "between")])
def test_a_killed_worker_is_named_by_all_others(
    zygote: Zygote, tmp_path: Path, phase: Phase, soon: Soon
) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase=phase).kill()
    with ranks(zygote, tmp_path, 3, scenario(injector), local_size=3, fork=1) as run:
        run.wait()
        fault = injector.only_fault(run)
        assert (fault["phase"], run.codes()[1]) == (phase, -signal.SIGKILL)
        assert all(code not in (0, -signal.SIGKILL) for code in run.codes()[::2])
        names = "rank 1 is gone.*(waits for the push of rank|last push was)"
        check_told(run, fault["at_s"], [0, 2], names, soon)
        run.check_nothing_left()


@pytest.mark.parametrize("phase", ["backward", *long_cases("forward", "between")])
def test_a_killed_worker_of_a_ring_is_named(
    zygote: Zygote, tmp_path: Path, phase: Phase, soon: Soon
) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase=phase).kill()
    told = scenario(injector, settings={"architecture": "ring"})
    with ranks(zygote, tmp_path, 3, told) as run:
        run.wait()
        fault = injector.only_fault(run)
        assert run.codes()[1] == -signal.SIGKILL
        check_told(run, fault["at_s"], [0, 2], "rank 1 is gone", soon)
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("norm", [{"clip_grad_norm": 0.1}, {}], ids=["norm", ""])
@pytest.mark.parametrize("architecture", ["hybrid", "p2p"])
@pytest.mark.parametrize("phase", ["backward", "forward"])
def test_a_killed_worker_of_a_model_with_a_table(
    zygote: Zygote,
    tmp_path: Path,
    phase: Phase,
    architecture: str,
    norm: dict[str, float],
    soon: Soon,
) -> None:
    """Some wait for its rows and others for its part of an all-reduce, or all for the norm."""
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase=phase).kill()
    told = scenario(injector, size="words", settings={"architecture": architecture, **norm})
    with ranks(zygote, tmp_path, 3, told, fork=1) as run:
        run.wait()
        fault = injector.only_fault(run)
        assert run.codes()[1] == -signal.SIGKILL
        check_told(
            run, fault["at_s"], [0, 2], r"rank 1 is gone|server 1 \(beside rank 1\) is gone", soon
        )
        run.check_nothing_left()


@pytest.mark.parametrize("size", ["small", *long_cases("large")])
def test_a_worker_that_takes_its_server_with_it_is_named(
    zygote: Zygote, tmp_path: Path, size: str, soon: Soon
) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase="backward").kill()
    with ranks(zygote, tmp_path, 2, scenario(injector, size=size), fork=1) as run:
        run.wait()
        fault = injector.only_fault(run)
        check_told(
            run, fault["at_s"], [0], r"rank 1 is gone|server 1 \(beside rank 1\) is gone", soon
        )
        run.check_nothing_left()


@pytest.mark.long
def test_the_only_server_s_worker_is_killed(zygote: Zygote, tmp_path: Path, soon: Soon) -> None:
    injector = EventInjector(tmp_path).at(rank=0, step=4, phase="forward").kill()
    with ranks(zygote, tmp_path, 3, scenario(injector), local_size=3, fork=1) as run:
        run.wait()
        fault = injector.only_fault(run)
        names = r"rank 0 is gone|server 0 \(beside rank 0\) is gone"
        check_told(run, fault["at_s"], [1, 2], names, soon)
        run.check_nothing_left()


@pytest.mark.parametrize("phase", ["forward", *long_cases("backward")])
def test_a_killed_server_is_named_by_all(
    zygote: Zygote, tmp_path: Path, phase: Phase, soon: Soon
) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase=phase).kill_server()
    as_process = scenario(injector, settings={"plane": "python"})
    with ranks(zygote, tmp_path, 2, as_process, fork=1) as run:
        run.wait()
        fault = injector.only_fault(run)
        check_told(run, fault["at_s"], [0, 1], r"server 1 \(beside rank 1\) is gone", soon)
        run.check_nothing_left()


@pytest.mark.long
def test_a_kill_at_any_moment_ends_everybody(zygote: Zygote, tmp_path: Path) -> None:
    """Also while they start, join and say goodbye, where there may be no step to name yet."""
    dice = random.Random(20_24)
    counted = 0
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        victim, delay_s = dice.randrange(3), dice.uniform(0.05, 3.5)
        plan = Scenario(steps=STEPS, pause_s=0.01, settings={"join_timeout_s": 6})
        with workers(zygote, folder, 3, plan, local_size=3) as run:
            time.sleep(delay_s)
            process = run.started[victim]
            os.kill(process.pid, signal.SIGKILL)
            killed_at_s = time.monotonic()
            counted += 1
            run.wait(20)
            for rank, result in run.results().items():
                assert result.get("error") in {"PeerLost", "StepTimeout"}, (rank, run.output())
                about = rf"rank {victim}\b" if victim else r"rank 0\b|server 0\b"
                assert re.search(about, result["message"]), (victim, run.results(), run.output())
                limit_s = TOLD_WITHIN_S if result["error"] == "PeerLost" else 6 + TOLD_WITHIN_S
                assert result["at_s"] - killed_at_s < limit_s, (rank, delay_s, result)
            assert len(run.results()) >= 2, (delay_s, run.output())
            run.check_nothing_left()
    assert counted == 3
