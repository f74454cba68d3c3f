"""A rank whose error has ended its training and whose process stays: the others need not wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ForepropError
from tests.cluster import run_cluster
from tests.faults.lost_peers import Soon, ranks
from tests.process.harness import ROOT, Zygote, workers
from tests.process.train_script import Scenario
from tests.tiers import long_cases

TOLD_WITHIN_S = 5.0  # of 300 s, step_timeout_s
OWN, OURS = ValueError("odd"), foreprop.TrainingLoopError("rank 1: odd")


@pytest.mark.parametrize(
    ("architecture", "error"),
    [
        *[("p2p", OURS), ("ring", OWN), ("hybrid", OWN)],
        *[
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("p2p", OWN), ("ring", OURS), ("hybrid", OURS)]
        ],
    ],
)
def test_an_error_that_leaves_step_is_told_at_once(
    architecture: str, error: BaseException, soon: Soon
) -> None:
    """It is caught, and the rank does something else, with the session open."""
    told, trained = threading.Event(), threading.Barrier(2, timeout=60)

    def work(world: World) -> tuple[str, float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.EmbeddingBag(9, 4, sparse=architecture == "hybrid"), nn.Linear(4, 2)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"architecture": architecture, "stall_report_s": 2.0}
        session: Any = foreprop.parallelize(model, optimizer, world=world, **settings)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randint(9, (3, 2))).sum().backward()
            optimizer.step()

        step()
        step()
        session.flush()
        trained.wait()  # otherwise rank 0 may be told of the error in its flush
        if world.rank == 1:
            session._training.backends.engines[0].end_step = raiser(error)
            with pytest.raises(type(error), match="odd"):
                step()
            assert told.wait(60), "rank 0 is waiting"
            with pytest.raises(ForepropError, match="odd"):
                session.flush()
            session.close()
            return "", 0.0
        started = time.monotonic()
        try:
            with pytest.raises(ForepropError, match=r"rank 1.*odd") as raised:
                step_for_ever(step)
            return str(raised.value), time.monotonic() - started
        finally:
            told.set()
            session.close()

    text, took_s = run_cluster(2, work)[0]
    assert soon(took_s, TOLD_WITHIN_S), text


def raiser(error: BaseException) -> Any:
    def end_step(step: int) -> None:
        raise error

    return end_step


def step_for_ever(step: Any) -> None:
    while True:
        step()


@pytest.mark.process
@pytest.mark.parametrize(
    ("architecture", "size"),
    [("ring", 2), *[pytest.param(each, 3, marks=pytest.mark.long) for each in ("p2p", "ring")]],
)
def test_an_error_that_nobody_catches_in_a_process_with_threads(
    zygote: Zygote, tmp_path: Path, architecture: str, size: int, soon: Soon
) -> None:
    settings = {"architecture": architecture, "stall_report_s": 2.0}
    told = Scenario(steps=1000, raise_at={"1": 3}, thread_s=900.0, settings=settings, pause_s=0.01)
    with ranks(zygote, tmp_path, size, told, fork=int(architecture == "p2p")) as run:
        lingering = run.started[1]
        run.wait(but=[lingering])
        assert lingering.is_running()
        results = run.results()
        for rank in range(0, size, 2):
            assert "rank 1 ended: ValueError: the data are odd" in results[rank]["message"]
            assert soon(results[rank]["at_s"] - results[1]["at_s"], TOLD_WITHIN_S), results


EXITS = ROOT / "tests" / "process" / "exit_script.py"


@pytest.mark.process
@pytest.mark.parametrize("code", ["1", *long_cases("0")])
def test_who_exits_is_not_waited_for_in_a_collective_of_the_others(
    zygote: Zygote, tmp_path: Path, code: str
) -> None:
    """Nor does it wait in `close()` for who waits for it: both would for ``step_timeout_s``."""
    about: Any = {"local_size": 2, "fork": 1, "script": EXITS, "EXIT_CODE": code}
    with workers(zygote, tmp_path, 2, Scenario(), **about) as run:
        run.wait(60)
        assert "rank 1 has had enough" in run.output()
        assert "Connection closed by peer" in run.output() or "Connection reset" in run.output()
        assert run.codes()[0] == 1
        run.check_nothing_left()
