"""`close()` ends in time and names whom it waited for, in every architecture."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.engine.world import World
from foreprop.errors import StepTimeout
from tests.cluster import run_cluster
from tests.faults.faults import EventInjector
from tests.faults.lost_peers import Soon
from tests.process.harness import Zygote, workers
from tests.process.train_script import Scenario
from tests.tiers import long_cases

TIMEOUT_S = 2.0
MARGIN_S = 4.0
BUSY_S, LONGER_S = 3.0, 5.0
"""Beside other programs; and of processes."""


def train(world: World, steps: int = 2, **settings: Any) -> foreprop.Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = foreprop.parallelize(model, optimizer, world=world, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(9, (3, 2))).sum().backward()
        optimizer.step()
    return session


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "p2p": ({"architecture": "p2p"}, 1),
    "p2p, one server": ({"architecture": "p2p"}, 3),
    "hybrid": ({"architecture": "hybrid"}, 1),
    "relays": ({"architecture": "p2p"}, 2),
    "ring": ({"architecture": "ring"}, 1),
}


@pytest.mark.parametrize(
    ("layout", "timeout_s"),
    [
        *[(layout, BUSY_S) for layout in ("relays", "ring")],
        *[pytest.param(layout, TIMEOUT_S, marks=pytest.mark.long) for layout in LAYOUTS],
    ],
)
def test_a_rank_that_does_not_close_is_named(layout: str, timeout_s: float, soon: Soon) -> None:
    """It trains as the others do, and then does something else."""
    settings, local_size = LAYOUTS[layout]
    settings = {**settings, "step_timeout_s": timeout_s, "stall_report_s": 0.5}
    if layout == "ring":
        settings["sparse_reduction"] = None
    raised = threading.Barrier(3, timeout=60)

    def work(world: World) -> tuple[str, float]:
        session = train(world, **settings) if layout != "ring" else dense(world, **settings)
        session.flush()
        if world.rank == 1:
            raised.wait()
            with_suppressed_close(session)
            return "", 0.0
        started = time.monotonic()
        try:
            with pytest.raises(StepTimeout) as found:
                session.close()
        finally:
            raised.wait()
        return str(found.value), time.monotonic() - started

    results = run_cluster(3, work, local_size=local_size)
    for text, took_s in (results[0], results[2]):
        assert re.search(r"rank 1\b|ranks 0, 1\)|ranks 1\b", text), text
        assert "step_timeout_s" in text
        assert soon(took_s, TIMEOUT_S + MARGIN_S)


def dense(world: World, **settings: Any) -> foreprop.Session:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = foreprop.parallelize(model, optimizer, world=world, **settings)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return session


def with_suppressed_close(session: foreprop.Session) -> None:
    with contextlib.suppress(StepTimeout, foreprop.TransportError):
        session.close()


@pytest.mark.long
@pytest.mark.process
@pytest.mark.alone
@pytest.mark.timeout(120)
@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_a_rank_that_is_stopped_after_its_last_push(
    zygote: Zygote, tmp_path: Path, architecture: str
) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=6, phase="between").stop()
    told = Scenario(
        steps=6,
        faults=tuple(injector.plan),
        settings={"architecture": architecture, "step_timeout_s": LONGER_S, "stall_report_s": 0.5},
    )
    with workers(zygote, tmp_path, 3, told, local_size=3, fork=int(architecture == "p2p")) as run:
        stopped = run.started[1]
        run.wait(but=[stopped])
        fault = injector.only_fault(run)
        assert time.monotonic() - fault["at_s"] < LONGER_S + 2 * MARGIN_S
        assert re.search(r"rank 1\b", run.output()), run.output()
        assert "step_timeout_s" in run.output()
        stopped.kill()
        run.wait()
        run.check_nothing_left()


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p", "ring")])
def test_two_sessions_closed_in_opposite_orders(architecture: str, soon: Soon) -> None:
    def work(world: World) -> float:
        make = dense if architecture == "ring" else train
        sessions = [make(world, architecture=architecture) for _ in range(2)]
        for session in sessions:
            session.flush()
        started = time.monotonic()
        for session in sessions[:: 1 - 2 * world.rank]:
            session.close()
        return time.monotonic() - started

    for took_s in run_cluster(2, work):
        assert soon(took_s, 5.0)


def test_a_session_closed_with_another_open_still_names_who_does_not_come() -> None:
    """The last `close()` says what became of the first."""
    raised = threading.Barrier(2, timeout=60)

    def work(world: World) -> str:
        settings = {"step_timeout_s": BUSY_S}
        first, second = (dense(world, **settings) for _ in range(2))
        first.flush()
        second.flush()
        if world.rank == 1:
            raised.wait()
            for session in (first, second):
                with_suppressed_close(session)
            return ""
        first.close()  # at once
        try:
            with pytest.raises(StepTimeout, match="rank 1") as found:
                second.close()
        finally:
            raised.wait()
        return str(found.value)

    assert "did not close" in run_cluster(2, work)[0]
