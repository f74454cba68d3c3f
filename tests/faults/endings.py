"""Sessions that end in several ways, and what each leaves in its process: nothing.

As a program: where servers are processes, forked from this one, which then has no child any more.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import foreprop
from foreprop.backends.processes import ProcessServer
from foreprop.engine.world import World
from foreprop.errors import ForepropError, HandshakeError
from tests.cluster import run_cluster
from tests.leaks import Snapshot, wait_for_leaks
from tests.process.forked import end_process, fork_servers

GRACE_S = 60.0
"""What is over soon, and is waited for, is over at some time also where the machine is busy."""


def train(world: World, steps: int = 3, **settings: Any) -> foreprop.Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = foreprop.parallelize(model, optimizer, world=world, **settings)
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    except ForepropError:
        with contextlib.suppress(ForepropError):
            session.close()
        raise
    return session


def orderly(world: World) -> None:
    train(world).close()


def train_for_ever(session: foreprop.Session) -> None:
    while True:
        session.flush()


def raising(world: World) -> None:
    if world.rank:
        message = "rank 0 ended: ValueError: odd data"
        with pytest.raises(ForepropError, match=message), train(world) as session:
            train_for_ever(session)
        return
    session = train(world)
    with contextlib.suppress(ValueError), session:
        raise ValueError("odd data")


def cut(world: World) -> None:
    """The connection of rank 1 breaks without a word: rank 0 may hear of it in its last step."""
    with pytest.raises(ForepropError):
        cut_and_train(world)


def cut_and_train(world: World) -> None:
    with train(world) as session:
        if world.rank == 1:
            session.flush()
            for stream in session._training.backends.all[-1].connections.streams:
                stream.close()
        train_for_ever(session)


def refused(world: World) -> None:
    with pytest.raises(HandshakeError):
        train(world, slice_elems=7 + world.rank)


def paced(world: World) -> None:
    train(world, link_rate_bits_per_s=1e9).close()


def real_servers(world: World) -> None:
    world.in_process = False
    session = train(world, steps=1, plane="python")
    assert all(
        isinstance(handle, ProcessServer)
        for handle in session._training.backends.all[-1].connections.handles
    )
    session.close()


def real_servers_failing(world: World) -> None:
    world.in_process = False
    failing = contextlib.suppress(ForepropError, ValueError)
    with failing, train(world, steps=1, plane="python"):
        raise ValueError("odd data")


def check_nothing_left(
    work: Callable[[World], None], *, times: int = 1, local_size: int = 2
) -> None:
    run_cluster(2, orderly)  # what torch opens once and for ever is there now
    before = Snapshot.take()
    for _ in range(times):
        run_cluster(2, work, local_size=local_size)
    leaks = wait_for_leaks(before, GRACE_S)
    assert not leaks, leaks.describe()


if __name__ == "__main__":
    os.environ["FOREPROP_PLANE"] = "python"  # with which a server is a process
    fork_servers(1)
    check_nothing_left(real_servers_failing)
    deadline = time.monotonic() + GRACE_S
    while children := psutil.Process().children():
        assert time.monotonic() < deadline, children
    print("nothing is left")
    end_process()
