"""``foreprop run --elastic --nodes MIN:MAX``: a host that fails is started again, and joins.

torchrun is the real one; the worker is a script that notes what it was told. `test_run_command`
says which hosts there are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreprop.core.slicing import Slice
from foreprop.tools.run.rejoins import NodeRange
from foreprop.tools.run.restarts import Restarts
from foreprop.tools.run.run import Outcome
from tests.countedlogs import counted_by
from tests.process.elastic_script import Plan as ElasticPlan
from tests.process.elastic_script import by_arithmetic
from tests.process.harness import ROOT
from tests.process.launches import LOCAL, Launch, prepared

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ADDRESSES = "127.0.0.9:1,[::1]:2"
A, B, C = "127.0.0.1", "198.51.100.1", "198.51.100.2"


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    return prepared(tmp_path, monkeypatch)


class Rejoined:
    """One run with ``--nodes``: its outcome, its lines and its workers' lines."""

    def __init__(
        self,
        launch: Launch,
        hosts: str,
        actions: tuple[str, ...],
        nodes: tuple[int, int],
        *,
        restarts: int = 0,
        heard: Callable[[str], None] = lambda text: None,
        **about: Any,
    ) -> None:
        self.said: list[str] = []

        def say(text: str) -> None:
            self.said.append(text)
            heard(text)

        plan = launch.plan(hosts, *actions, elastic=True, **about)
        out: Any = io.BytesIO()
        runs = Restarts(plan, out, io.BytesIO(), say=say, most=restarts, nodes=NodeRange(*nodes))
        self.outcome = runs.run()
        self.out = out.getvalue().decode().splitlines()


def test_a_host_that_failed_joins_the_others(launch: Launch) -> None:
    """With its rank, the world's size, a rendezvous of its own, the same secret, and an address."""
    mark, joined = str(launch.folder / "mark"), str(launch.folder / "joined")
    shown = ("FOREPROP_JOIN", "FOREPROP_ELASTIC", "LOCAL_RANK", "MASTER_ADDR", "GROUP_RANK")
    run = Rejoined(
        launch,
        LOCAL,
        (
            *(f"0:serve={ADDRESSES}", "0:secret=", f"0:touch={mark}", f"0:wait={joined}"),
            *(f"1:wait={mark}", "1:kill=9"),
            *(f"1+:show={name}" for name in shown),
            *("1+:secret=", f"1+:touch={joined}"),
        ),
        (1, 2),
        restarts=1,
    )
    assert run.outcome == Outcome(0)
    assert run.said == [
        "rank 1 on 127.0.0.2 was killed by SIGKILL; goes on with 1 of 2; 127.0.0.2 is started"
        " again (restart 1 of 1)",
        "127.0.0.2 starts as rank 1; now 2 of 2",
    ]
    assert run.out.count(f"[1] rank 1 of 2 in {launch.folder}, GPUs None") == 2
    values = (ADDRESSES, "True", "0", "127.0.0.1", "1")
    for name, value in zip(shown, values, strict=True):
        assert f"[1] {name}={value}" in run.out
    secrets = {line.partition("secret ")[2] for line in run.out if "secret " in line}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64


@pytest.mark.long
def test_fewer_than_the_least_end_it(launch: Launch) -> None:
    run = Rejoined(launch, LOCAL, ("1:exit=7", "0:sleep=600"), (2, 2), restarts=9)
    how = "start again with those that answer, or fewer"
    assert run.outcome == Outcome(
        7,
        "rank 1 on 127.0.0.2 ended with exit code 7; 1 of 2 hosts are left, and --nodes says 2 at"
        f" least: {how}",
    )
    assert run.said == []


@pytest.mark.long
def test_a_spare_host_takes_the_place_of_one_that_failed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b fails and may not start again; c is more than the most, and stands by."""
    launch.tell_ssh(monkeypatch)
    mark, joined = str(launch.folder / "mark"), str(launch.folder / "joined")
    run = Rejoined(
        launch,
        f"{A}\n{B}\n{C}\n",
        (
            *(f"0:serve={ADDRESSES}", f"0:touch={mark}", f"0:wait={joined}"),
            *(f"1:wait={mark}", "1:kill=9", f"1+:touch={joined}"),
        ),
        (1, 2),
    )
    assert run.outcome == Outcome(0)
    assert run.said == [
        f"rank 1 on {B} was killed by SIGKILL; goes on with 1 of 2; without {B}",
        f"{C} starts as rank 1; now 2 of 2",
    ]


@pytest.mark.long
def test_a_training_grows_by_a_host_that_answers_later(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one: a begins alone, with a server, and has the bits of the log with b."""
    launch.tell_ssh(monkeypatch, unreachable=[B])
    told = ElasticPlan(steps=20, awaits=8, settings={"join_timeout_s": 60.0})
    monkeypatch.setenv("PLAN", told.encode())
    monkeypatch.setenv("RESULTS", str(launch.folder))
    monkeypatch.setenv("FOREPROP_COUNTED_LOG", str(launch.folder / "logs"))

    def heard(text: str) -> None:
        if "goes on without" in text:
            launch.tell_ssh(monkeypatch)

    script = str(ROOT / "tests" / "process" / "elastic_script.py")
    run = Rejoined(launch, f"{A}\n{B}\n", (), (1, 2), heard=heard, script=(script,))
    assert run.outcome == Outcome(0), run.said
    assert run.said[0].startswith(f"goes on without {B}: {B} cannot be reached; try `")
    assert run.said[1:] == [f"{B} starts as rank 1; now 2 of 2"]
    first, second = (
        json.loads((launch.folder / f"rank-{rank}.json").read_text()) for rank in range(2)
    )
    assert second["joined_at"] > told.awaits - 1
    pieces = [Slice(*piece) for piece in first["pieces"]]
    counted = counted_by(launch.folder / "logs", 0, 2, [piece.number for piece in pieces])
    expected = by_arithmetic(2, told.steps, pieces, [counted])
    assert (first["sha256"], second["sha256"]) == (expected, expected)


@pytest.mark.long
def test_a_host_is_started_again_so_often_and_waited_for_meanwhile(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is off when it is first tried again; then it fails once more, and is given up."""
    launch.tell_ssh(monkeypatch, unreachable=[])
    mark, done = launch.folder / "mark", launch.folder / "done"

    def heard(text: str) -> None:
        launch.tell_ssh(monkeypatch, unreachable=[B] if "(restart 1" in text else [])
        if "after restart 1 of 1" in text:
            done.touch()

    run = Rejoined(
        launch,
        f"{A}\n{B}\n",
        (
            *(f"0:serve={ADDRESSES}", f"0:touch={mark}", f"0:wait={done}"),
            *(f"1:wait={mark}", "1:kill=9", "1+:exit=5"),
        ),
        (1, 2),
        restarts=1,
        heard=heard,
    )
    assert run.outcome == Outcome(0)
    tried = run.said.pop(1)
    assert tried.startswith(f"{B} cannot be reached; try `")
    assert tried.endswith("; it is tried again")
    assert run.said == [
        f"rank 1 on {B} was killed by SIGKILL; goes on with 1 of 2; {B} is started again (restart 1"
        " of 1)",
        f"{B} starts as rank 1; now 2 of 2",
        f"rank 1 on {B} ended with exit code 5; goes on with 1 of 2; without {B}, after restart 1"
        " of 1",
    ]
