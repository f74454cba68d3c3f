"""What a session tells of itself while it trains: figures, lines of a log, word in a folder."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import foreprop
from foreprop.config import LOGGER
from foreprop.config.checks import parse_windows
from foreprop.core.lateness import Straggler
from foreprop.engine.metrics import Meter, Metrics, Totals
from foreprop.engine.status import StatusFile, read_statuses
from foreprop.errors import ConfigError
from foreprop.session.figures import Follower
from tests.cluster import worlds


def metrics(**changed: Any) -> Metrics:
    values: dict[str, Any] = {
        "step": 500,
        "steps": 100,
        "seconds": 18.2,
        "waits": 7,
        "waited_s": 2.184,
        "pushed_bytes": 2_502_500_000,
        "reply_bytes": 0,
        "queue_depth": 3,
        "max_queue_depth": 9,
    }
    return Metrics(**{**values, **changed})


def test_a_line_says_how_it_goes() -> None:
    assert str(metrics()) == "step 500: 5.49 steps/s, 182 ms/step, 12% waiting, 1.1 Gbit/s out"
    late = Straggler(rank=3, late_s=0.04, since_step=120, cause="link")
    assert str(metrics(reply_bytes=1_000_000_000, straggler=late)).endswith(
        "1.1 Gbit/s out, 440 Mbit/s in, rank 3 is late by 40 ms per step: its link since step 120"
    )
    assert str(metrics(steps=0)) == "step 500: no step in 18.2 s"


def test_scalars_are_numbers() -> None:
    found = metrics().scalars()
    assert found["step_s"] == pytest.approx(0.182)
    assert found["waiting_share"] == pytest.approx(0.12)
    assert found["sent_bits_per_s"] == pytest.approx(1.1e9)
    assert "straggler_rank" not in found
    late = metrics(straggler=Straggler(rank=3, late_s=0.04, since_step=1, cause="link")).scalars()
    assert (late["straggler_rank"], late["straggler_late_s"]) == (3, 0.04)
    its_server = Straggler(rank=None, late_s=0.04, since_step=1, cause="link")
    server = metrics(straggler=its_server).scalars()
    assert "straggler_rank" not in server
    empty = metrics(steps=0, seconds=0.0)
    assert math.isnan(empty.step_s)
    assert empty.scalars() == {"queue_depth": 3.0}
    with pytest.raises(AttributeError):
        empty.step = 3  # type: ignore[misc]


def test_a_meter_tells_what_was_since_the_last_look() -> None:
    totals = [
        Totals(step=10, waits=5, waited_s=1.0, pushed_bytes=100, reply_bytes=80),
        Totals(step=30, waits=9, waited_s=1.5, pushed_bytes=300, reply_bytes=90, queue_depth=2),
        Totals(step=31, waits=1, waited_s=0.25, pushed_bytes=40, reply_bytes=5),
    ]
    clock = iter([0.0, 4.0, 5.0])
    reading = iter(totals)
    meter = Meter(lambda: next(reading), clock=lambda: next(clock))
    first = meter.since_last()
    assert (first.step, first.steps, first.seconds) == (30, 20, 4.0)
    assert (first.waits, first.waited_s, first.pushed_bytes, first.reply_bytes) == (4, 0.5, 200, 10)
    assert first.queue_depth == 2
    second = meter.since_last()  # connected anew: all but the steps counts from the start
    assert (second.steps, second.waits, second.waited_s, second.pushed_bytes) == (1, 1, 0.25, 40)


def test_callbacks_have_windows_of_their_own() -> None:
    done = 0
    follower = Follower(lambda: Totals(step=done, pushed_bytes=10 * done))
    told: dict[int, list[tuple[int, int, int]]] = {2: [], 3: []}
    for every in told:
        follower.call_every(
            every, lambda m, every=every: told[every].append((m.step, m.steps, m.pushed_bytes))
        )
    follower.straggler = lambda: Straggler(rank=1, late_s=0.5, since_step=2, cause="link")
    for step in range(1, 7):
        done = step
        follower.end_step(step)
    assert told == {2: [(2, 2, 20), (4, 2, 20), (6, 2, 20)], 3: [(3, 3, 30), (6, 3, 30)]}
    found = follower.metrics()
    assert found.steps == 6
    assert found.straggler == Straggler(rank=1, late_s=0.5, since_step=2, cause="link")
    with pytest.raises(ConfigError, match="steps is 0"):
        follower.call_every(0, print)


def train(session_of: Any, steps: int) -> foreprop.Session:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session: foreprop.Session = session_of(model, optimizer)
    with session:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        session.flush()
        session.found = session.metrics()  # type: ignore[attr-defined]
    return session


@pytest.mark.parametrize("alone", [True, False])
def test_a_session_logs_every_few_steps_and_leaves_word(
    alone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Metrics] = []

    def session_of(model: Any, optimizer: Any) -> foreprop.Session:
        world = None if alone else worlds(1)[0]
        watch = str(tmp_path / "watch")
        made = foreprop.parallelize(model, optimizer, world=world, log_steps=2, watch=watch)
        made.call_every(3, seen.append)
        return made

    with caplog.at_level(logging.INFO, logger="foreprop"):
        session = train(session_of, 5)
    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if line.startswith("step ")]
    assert [line.partition(":")[0] for line in told] == ["step 2", "step 4"]
    assert [(found.step, found.steps) for found in seen] == [(3, 3)]
    found = session.found  # type: ignore[attr-defined]
    assert (found.step, found.steps) == (5, 5)
    assert (found.pushed_bytes > 0) == (not alone)
    (status,) = read_statuses(tmp_path / "watch")
    assert (status.rank, status.world_size, status.state, status.step) == (0, 1, "closed", 5)


@pytest.mark.parametrize("alone", [True, False])
def test_metrics_cost_nothing_until_they_are_asked_for(alone: bool) -> None:
    world = None if alone else worlds(1)[0]
    session = train(lambda m, o: foreprop.parallelize(m, o, world=world), 2)
    found = session.found  # type: ignore[attr-defined]
    assert found.steps == 0, "counted before anybody asked"


def test_an_error_is_left_in_the_folder(tmp_path: Path) -> None:
    def session_of(model: Any, optimizer: Any) -> foreprop.Session:
        made = foreprop.parallelize(model, optimizer, world=worlds(1)[0], watch=str(tmp_path))
        model.register_forward_hook(_fail)
        return made

    def _fail(*_: Any) -> None:
        raise ValueError("the data are odd")

    with pytest.raises(ValueError, match="odd"):
        train(session_of, 1)
    (status,) = read_statuses(tmp_path)
    assert (status.state, status.error) == ("failed", "ValueError: the data are odd")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("setting", ["watch", "trace"])
def test_a_folder_that_cannot_be_written_is_told_before(
    alone: bool, setting: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file")
    world = None if alone else worlds(1)[0]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"{setting} is '.*file'"):
        foreprop.parallelize(model, optimizer, world=world, **{setting: folder})


def test_of_several_sessions_the_newest_is_read(tmp_path: Path) -> None:
    for rank in range(3):
        StatusFile(str(tmp_path), "old", rank, 3).write("training", 7, metrics())
    StatusFile(str(tmp_path), "new", 1, 2).write("training", 3, metrics(steps=0))
    (status,) = read_statuses(tmp_path)
    assert (status.session, status.step, status.step_s) == ("new", 3, None)
    (tmp_path / "rank-5.status.json").write_text("{")
    with pytest.raises(ConfigError, match=r"rank-5.status.json is no rank's status"):
        read_statuses(tmp_path)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("text", "steps"),
    [("3", [3]), ("2-4", [2, 3, 4]), (" 1 - 2 , 9", [1, 2, 9]), ("5-5", [5])],
)
def test_windows_of_steps_are_read(text: str, steps: list[int]) -> None:
    assert [step for window in parse_windows(text) for step in window] == steps


@pytest.mark.parametrize("text", ["", "0-3", "4-2", "1,", "a-b", "1-2-3", "-4"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="trace_steps is "):
        foreprop.Config(trace_steps=text)


# Where messages are shown.
SHOWING = """
import logging, sys
from foreprop.config import LOGGER
mode = sys.argv[1]
if mode == "basic":
    logging.basicConfig(format="mine %(message)s")
if mode == "file":
    logging.basicConfig(filename=sys.argv[2], format="mine %(message)s")
if mode == "own":
    LOGGER.addHandler(logging.StreamHandler())
if mode == "quiet":
    LOGGER.setLevel(logging.WARNING)
LOGGER.info("it goes on")
LOGGER.warning("rank %d is late", 3)
"""


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        pytest.param("none", ["foreprop: it goes on", "foreprop: rank 3 is late"], marks=LONG),
        pytest.param("quiet", ["foreprop: rank 3 is late"], marks=LONG),
        pytest.param("basic", ["mine it goes on", "mine rank 3 is late"], marks=LONG),
        ("own", ["it goes on", "rank 3 is late"]),
        ("file", ["foreprop: it goes on", "foreprop: rank 3 is late"]),
    ],
)
def test_messages_are_seen_once_on_standard_error(
    mode: str, shown: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    run = subprocess.run(
        [sys.executable, "-c", SHOWING, mode, str(log)], capture_output=True, text=True, check=True
    )
    assert run.stderr.splitlines() == shown
    if mode == "file":
        assert log.read_text().splitlines() == ["mine it goes on", "mine rank 3 is late"]


def test_the_logger_is_that_of_the_package() -> None:
    assert LOGGER is logging.getLogger("foreprop")
