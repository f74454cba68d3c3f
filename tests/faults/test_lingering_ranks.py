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
from foreprop.cluster.world import World
from foreprop.errors import ForepropError
from tests.cluster import run_cluster
from tests.process.harness import Zygote, workers
from tests.process.train_script import Scenario
from tests.tiers import long_cases

pytestmark = pytest.mark.timeout(60)

TOLD_WITHIN_S = 5.0  # of 300 s, step_timeout_s


@pytest.mark.parametrize("architecture", ["p2p", "ring", "hybrid"])
@pytest.mark.parametrize("error", [ValueError("odd"), foreprop.TrainingLoopError("rank 1: odd")])
def test_an_error_that_leaves_step_is_told_at_once(architecture: str, error: BaseException) -> None:
    """It is caught, and the rank does something else, with the session open."""
    told, trained = threading.Event(), threading.Barrier(2, timeout=30)

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
            assert told.wait(30), "rank 0 is waiting"
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
    assert took_s < TOLD_WITHIN_S, text


def raiser(error: BaseException) -> Any:
    def end_step(step: int) -> None:
        raise error

    return end_step


def step_for_ever(step: Any) -> None:
    while True:
        step()


@pytest.mark.process
@pytest.mark.parametrize("architecture", ["ring", *long_cases("p2p")])
def test_an_error_that_nobody_catches_in_a_process_with_threads(
    zygote: Zygote, tmp_path: Path, architecture: str
) -> None:
    settings = {"architecture": architecture, "stall_report_s": 2.0}
    told = Scenario(steps=1000, raise_at={"1": 3}, thread_s=25.0, settings=settings, pause_s=0.01)
    with workers(zygote, tmp_path, 3, told, fork=int(architecture == "p2p")) as run:
        lingering = run.started[1]
        run.wait(40, but=[lingering])
        assert lingering.is_running()
        results = run.results()
        for rank in (0, 2):
            assert "rank 1 ended: ValueError: the data are odd" in results[rank]["message"]
            assert results[rank]["at_s"] - results[1]["at_s"] < TOLD_WITHIN_S, results
