"""The error that ended a training loop is the one that is raised, whatever `close()` meets."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ForepropError, StepTimeout, StorageError
from tests.cluster import run_cluster, worlds


def started(world: World, *, fails: bool = True, **settings: Any) -> foreprop.Session:
    """A session that has made a step, and whose `close()` fails."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session: Any = foreprop.parallelize(model, optimizer, world=world, **settings)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    session.flush()

    def settle() -> None:
        raise StepTimeout("rank 3 does not come")

    if fails:
        session._training.settle_all = settle
    made: foreprop.Session = session
    return made


def loop(world: World, first: BaseException, begun: threading.Barrier | None = None) -> None:
    session = started(world)
    if begun is not None:
        begun.wait()
    try:
        raise first
    finally:
        session.close()


def test_close_in_a_finally_leaves_the_first_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="odd data") as raised:
        loop(worlds(1)[0], ValueError("odd data"))
    (note,) = raised.value.__notes__
    assert note == ("closing the foreprop session failed, too: StepTimeout: rank 3 does not come")
    assert note in capfd.readouterr().err


def test_the_others_are_told_the_first_error() -> None:
    begun = threading.Barrier(2, timeout=60)

    def work(world: World) -> str:
        if world.rank == 0:
            with pytest.raises(ValueError, match="odd data"):
                loop(world, ValueError("odd data"), begun)
            return "rank 0 ended: ValueError: odd data"
        session = started(world, fails=False)
        begun.wait()
        with pytest.raises(ForepropError) as raised:
            flush_for_ever(session)
        session.close()
        return str(raised.value)

    first, second = run_cluster(2, work)
    assert first in second


def flush_for_ever(session: foreprop.Session) -> None:
    while True:
        session.flush()


def test_close_raises_where_no_error_is_under_way() -> None:
    session = started(worlds(1)[0])
    with pytest.raises(StepTimeout, match="rank 3"):
        session.close()


def test_close_raises_in_a_program_that_handles_an_error_all_the_time() -> None:
    try:
        raise KeyError("no checkpoint")
    except KeyError:
        session = started(worlds(1)[0])
        with pytest.raises(StepTimeout, match="rank 3"):
            session.close()


def test_a_with_block_leaves_the_first_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="odd data") as raised:
        fail_in_a_block(tmp_path / "trace")
    assert "StorageError: the trace" in raised.value.__notes__[0]


def fail_in_a_block(folder: Path) -> None:
    with started(worlds(1)[0], fails=False, trace=str(folder)):
        make_unwritable(folder)
        raise ValueError("odd data")


def make_unwritable(folder: Path) -> None:
    """Also for root, whom no permission stops, and while a server writes to it."""
    if folder.exists():
        folder.rename(folder.with_name("moved"))
    folder.touch()


# What is written at the end.
@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_a_trace_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, architecture: str
) -> None:
    """On the rank that has it, before anything is changed; the others are told at once."""
    (tmp_path / "file").touch()

    def work(world: World) -> str:
        folder = tmp_path / ("file/trace" if world.rank == 1 else "trace")
        with pytest.raises(foreprop.ConfigError) as raised:
            started(world, architecture=architecture, trace=str(folder))
        return str(raised.value)

    for text in run_cluster(2, work):
        assert "trace is " in text
        assert "file/trace', a folder that cannot be written on this machine" in text


@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_a_trace_that_cannot_be_written_any_more(
    tmp_path: Path, architecture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace"
    settings = {"architecture": architecture, "trace": str(folder)}
    session = started(worlds(1)[0], fails=False, **settings)
    make_unwritable(folder)
    with pytest.raises(StorageError, match=r"the trace .*worker-0.* cannot be written"):
        session.close()
    if architecture == "p2p":
        assert "foreprop: server 0: the trace " in capfd.readouterr().err
