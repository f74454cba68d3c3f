"""The rendezvous store dies, or is cut off: every rank ends in time, with an error of ours."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ForepropError
from foreprop.tools.run.host import free_port
from tests.cluster import run_cluster
from tests.faults.lost_peers import Soon
from tests.process.harness import Run, Zygote, environment, running, wait_for
from tests.tiers import long_cases

pytestmark = [
    pytest.mark.process,
    pytest.mark.leaks_ok(reason="the store's client has a thread as long as the process"),
]

TIMEOUT_S, LONGER_S = 2.0, 6.0
MARGIN_S = 6.0
HOST = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(1000)
"""


class StoreHost:
    def __init__(self, run: Run, zygote: Zygote) -> None:
        self.port = free_port()
        script = run.folder / "host.py"
        script.write_text(HOST)
        self.process = run.start(
            zygote, environment(run.mark, {}), script=script, arguments=[str(self.port)]
        )
        wait_for(lambda: "ready" in run.output(), run)

    def world(self, like: World) -> World:
        client = dist.TCPStore(
            "127.0.0.1",
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=300),
        )
        store = dist.PrefixStore("test", client)
        fields = {"rank": like.rank, "size": like.size, "local_size": 1, "host": "127.0.0.1"}
        return World(**fields, store=store, raw_store=client, in_process=True)  # type: ignore[arg-type]


@pytest.fixture
def host(zygote: Zygote, tmp_path: Path) -> Iterator[StoreHost]:
    with running(tmp_path) as run:
        yield StoreHost(run, zygote)


def session_of(world: World, **settings: Any) -> tuple[foreprop.Session, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = foreprop.parallelize(model, optimizer, world=world, **settings)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    return session, step


@pytest.mark.parametrize(
    ("fault", "timeout_s"),
    [
        (signal.SIGKILL, LONGER_S),
        pytest.param(signal.SIGKILL, TIMEOUT_S, marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, TIMEOUT_S, marks=pytest.mark.long),
    ],
)
def test_in_the_middle_of_a_ring_s_training(
    host: StoreHost, fault: signal.Signals, timeout_s: float, soon: Soon
) -> None:
    """Some steps need the store: their error is ours, and comes in time."""

    def work(like: World) -> float:
        world = host.world(like)
        settings = {"architecture": "ring", "step_timeout_s": timeout_s, "stall_report_s": 0.5}
        session, step = session_of(world, **settings)
        step()
        session.flush()
        if world.rank == 0:
            os.kill(host.process.pid, fault)
        started = time.monotonic()
        with pytest.raises(ForepropError, match=r"lost the rendezvous store|rank \d is gone|rank"):
            step_for_ever(step)
        session.close()
        return time.monotonic() - started

    for took_s in run_cluster(2, work):
        assert soon(took_s, TIMEOUT_S + MARGIN_S)


def step_for_ever(step: Any) -> None:
    for _ in range(10_000):
        step()


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("ring")])
def test_while_joining(host: StoreHost, architecture: str, soon: Soon) -> None:
    """The store stops before rank 1 comes; rank 0 is waiting for it."""

    def work(like: World) -> float:
        world = host.world(like)
        if world.rank == 1:
            time.sleep(1.0)
            os.kill(host.process.pid, signal.SIGSTOP)
        started = time.monotonic()
        settings = {"architecture": architecture, "join_timeout_s": 3.0}
        with pytest.raises(ForepropError, match="lost the rendezvous store at 127"):
            session_of(world, **settings)
        return time.monotonic() - started

    for took_s in run_cluster(2, work):
        assert soon(took_s, 3.0 + MARGIN_S)
