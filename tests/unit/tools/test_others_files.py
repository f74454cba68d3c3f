"""Traces, logs and status files that somebody has changed: told by file, or taken."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from traced_run import record_run

from foreprop.core.membership import HEAD, CountedReplay
from foreprop.engine.pacing import Link
from foreprop.engine.status import StatusFile
from foreprop.errors import ConfigError, TransportError
from foreprop.features.members.countedlog import read_replay
from foreprop.tools.cli.top import live_page
from foreprop.tools.report.jobpage import Selection, read_job, render_job
from foreprop.tools.report.perfetto import merge_traces
from tests.tiers import long_cases

JUNK: list[Any] = [None, True, -1, 0, 7, 10**18, 2**70, 0.5, 1e300, "x", "", [], {}, [1], {"a": 1}]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    record_run(folder)
    return folder


def places(value: Any) -> list[tuple[Any, Any]]:
    """All containers and keys within."""
    found: list[tuple[Any, Any]] = []
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        found.append((value, key))
        if isinstance(item, dict | list):
            found += places(item)
    return found


def change(path: Path, data: st.DataObject) -> None:
    """A byte, the end, or a place of what it says."""
    content = path.read_bytes()
    how = data.draw(st.sampled_from(["byte", "end", "drop", "junk", "junk", "junk"]))
    if how == "byte":
        place = data.draw(st.integers(0, len(content) - 1))
        byte = bytes([data.draw(st.integers(0, 255))])
        path.write_bytes(content[:place] + byte + content[place + 1 :])
    elif how == "end":
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    else:
        says = msgspec.json.decode(content)
        container, key = data.draw(st.sampled_from(places(says)[:400]))
        if how == "drop":
            del container[key]
        else:
            container[key] = data.draw(st.sampled_from(JUNK))
        path.write_bytes(msgspec.json.encode(says))


@pytest.mark.parametrize("examples", [60, *long_cases(1500)])
def test_changed_traces_make_a_page_or_an_error(
    recorded: Path, tmp_path: Path, examples: int
) -> None:
    told = []

    @given(data=st.data())
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def check(data: st.DataObject) -> None:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(recorded, folder)
        change(data.draw(st.sampled_from(sorted(folder.iterdir()))), data)
        for make in (
            lambda: render_job(read_job(Selection(folder=folder)), command="foreprop report"),
            lambda: merge_traces(folder, tmp_path / "merged.json"),
        ):
            try:
                assert make()
            except ConfigError as error:
                told.append(str(error))

    check()
    assert len(told) > examples // 6


def test_a_pipe_in_a_trace_s_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "worker-0.abc.trace.json")
    with pytest.raises(ConfigError, match="is no ordinary file"):
        read_job(Selection(folder=tmp_path))


# What ranks leave for `foreprop top`.
def statuses(folder: Path) -> list[Path]:
    for rank in range(2):
        StatusFile(str(folder), "s", rank, 2).write("training", 7)
    return sorted(folder.iterdir())


def page_of(folder: Path) -> str:
    """As a terminal shows it, but for colours."""
    console = Console(width=120)
    with console.capture() as captured:
        console.print(live_page(folder)[0])
    return captured.get()


@pytest.mark.parametrize("examples", [60, *long_cases(600)])
def test_changed_statuses_are_shown_or_printed(tmp_path: Path, examples: int) -> None:
    told, whole = [], tmp_path / "whole"
    whole.mkdir()
    statuses(whole)

    @given(data=st.data())
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def check(data: st.DataObject) -> None:
        shutil.rmtree(tmp_path / "watch", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "watch")
        change(data.draw(st.sampled_from(sorted((tmp_path / "watch").iterdir()))), data)
        try:
            assert page_of(tmp_path / "watch")
        except ConfigError as error:
            told.append(str(error))

    check()
    assert len(told) > examples // 6


def rewrite(path: Path, **changes: object) -> None:
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))


def test_a_terminal_does_not_obey_what_a_rank_says(tmp_path: Path) -> None:
    first, _ = statuses(tmp_path)
    rewrite(first, host="\x1b]0;mine\x07", state="failed", error="\x1b[2Jgone\x9b1m\r")
    page = page_of(tmp_path)
    assert not set(page) & {"\x1b", "\x07", "\x9b", "\r"}
    assert r"rank 0 (\x1b]0;mine\x07) failed: \x1b[2Jgone\x9b1m\r" in page


@pytest.mark.parametrize("world_size", [0, -1, 10**9])
def test_a_world_that_cannot_be_is_no_status(tmp_path: Path, world_size: int) -> None:
    first, _ = statuses(tmp_path)
    rewrite(first, world_size=world_size)
    with pytest.raises(ConfigError, match=r"rank-0\.status\.json is no rank's .*world_size"):
        live_page(tmp_path)


def test_a_pipe_in_a_status_s_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.status.json")
    with pytest.raises(ConfigError, match="is no ordinary file"):
        live_page(tmp_path)


def test_a_link_in_the_new_file_s_place_is_not_followed(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.write_text("precious")
    folder = tmp_path / "watch"
    folder.mkdir()
    partial = folder / f"rank-0.status.json.{os.getpid()}.partial"
    partial.symlink_to(others)
    StatusFile(str(folder), "s", 0, 1).write("training", 7)
    assert others.read_text() == "precious"
    assert [path.name for path in folder.iterdir()] == ["rank-0.status.json"]


@pytest.mark.parametrize("make", [lambda path, others: path.symlink_to(others), None])
def test_an_emulated_link_follows_nobody(tmp_path: Path, make: Any) -> None:
    others, path = tmp_path / "others", tmp_path / "egress"
    others.write_text("precious")
    if make is None:
        os.mkfifo(path)
    else:
        make(path, others)
    with pytest.raises(TransportError, match=r"egress is no file of ours \(.*\): remove it"):
        Link(1e9, path)
    assert others.read_text() == "precious"


# What servers have counted.
LINES = st.lists(
    st.one_of(
        st.builds("{} {} {} {}".format, *[st.integers(-2, 9)] * 3, st.sampled_from("01-")),
        st.sampled_from(["5 left 1", "5 left -", "9" * 5000 + " 0 0 0", "1 0 0 0,0", "1_0 0 0 0"]),
        st.text(max_size=20),
    ),
    max_size=6,
)
HEADS = ["2 workers, 2 slices", "0 workers, 2 slices", "9" * 5000 + " workers, 2 slices", "x"]


def test_odd_logs_are_reported_or_counted() -> None:
    told, counted = [], 0

    @given(head=st.sampled_from(HEADS), lines=LINES, step=st.integers(0, 12))
    @settings(max_examples=200, deadline=None)
    def check(head: str, lines: list[str], step: int) -> None:
        nonlocal counted
        try:
            replay = CountedReplay([f"{HEAD}: {head}", *lines], 2, [0, 1])
        except ConfigError as error:
            told.append(str(error))
        else:
            assert all(set(replay.at(slice_, step)) <= {0, 1} for slice_ in (0, 1))
            counted += 1

    check()
    assert counted
    assert told
    assert all(each.startswith("counted_replay: ") for each in told)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["3 0 1 0", "2 0 1 0,1"], "'2 0 1 0,1' is of an earlier step"),
        (["3 0 1 2"], "counts ranks that there are not"),
        (["-3 0 1 0"], "is no line of a log"),
        (["3 0 1 " + "9" * 5000], "is no line of a log"),
    ],
)
def test_a_log_that_cannot_be_is_named(tmp_path: Path, lines: list[str], why: str) -> None:
    log = tmp_path / "server-0.x.counted"
    log.write_text("\n".join([f"{HEAD}: 2 workers, 2 slices", *lines]))
    with pytest.raises(ConfigError, match=f"{re.escape(why)}.*; the log is {log}"):
        read_replay(str(tmp_path), 0, 2, [0, 1])


def test_a_pipe_in_a_log_s_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "server-0.x.counted")
    with pytest.raises(ConfigError, match="is no ordinary file"):
        read_replay(str(tmp_path), 0, 2, [0, 1])
