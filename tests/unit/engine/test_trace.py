"""Traces are files that Chrome's and Perfetto's viewers open."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from traced_run import facts

from foreprop.config import Config
from foreprop.engine import trace
from foreprop.engine.trace import TraceRecorder
from foreprop.errors import ConfigError, StorageError
from foreprop.session.figures import trace_facts
from foreprop.tools.report.tracefile import latest_session, read_folder, read_trace


def read(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_a_trace_has_spans_with_their_numbers_and_the_names_of_process_and_threads(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "server-0.trace.json"
    recorder = TraceRecorder(path, "server 0", 1000)
    before_us = time.time_ns() / 1e3
    started_ns = recorder.now_ns()
    recorder.span("wait", "a.weight", started_ns, step=3, stop_ns=started_ns + 5_000)

    def work() -> None:
        recorder.span(
            "updated", "b", recorder.now_ns(), step=4, size_bytes=8, slice_=2, priority=1, peer=5
        )

    thread = threading.Thread(target=work, name="a thread that has ended")
    thread.start()
    thread.join()
    recorder.write()

    events = read(path)
    assert list(path.parent.iterdir()) == [path]
    process, *threads = [event for event in events if event["ph"] == "M"]
    assert (process["name"], process["args"]) == ("process_name", {"name": "server 0"})
    names = {event["tid"]: event["args"]["name"] for event in threads}
    assert {event["name"] for event in threads} == {"thread_name"}
    wait, updated = [event for event in events if event["ph"] == "X"]
    assert (wait["cat"], wait["name"], wait["dur"], wait["pid"]) == ("wait", "a.weight", 5.0, 1000)
    assert before_us - 1e3 < wait["ts"] < before_us + 10e6
    assert wait["args"] == {"step": 3, "bytes": 0, "slice": -1, "priority": 0, "peer": -1}
    assert updated["args"] == {"step": 4, "bytes": 8, "slice": 2, "priority": 1, "peer": 5}
    assert updated["dur"] >= 0
    assert names[wait["tid"]] == threading.current_thread().name
    assert names[updated["tid"]] == "a thread that has ended"


def test_a_long_run_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "_EVENTS_LIMIT", 3)
    recorder = TraceRecorder(tmp_path / "t.trace.json", "rank 0", 0)
    for step in range(5):
        recorder.span("wait", "p", recorder.now_ns(), step=step)
    recorder.write()
    assert [e["args"]["step"] for e in read(recorder.path) if e["ph"] == "X"] == [0, 1, 2]
    assert "2 events were left out of the trace" in caplog.text


def record(path: Path, process: str, steps: str | None = None, last: int = 3) -> TraceRecorder:
    recorder = TraceRecorder(path, process, 0, steps)
    for step in range(1, last + 1):
        recorder.span("wait", "p", recorder.now_ns(), step=step)
    return recorder


def test_only_the_steps_of_the_windows_are_recorded(tmp_path: Path) -> None:
    recorder = record(tmp_path / "worker-0.a.trace.json", "worker 0", "2-4,8", last=10)
    recorder.write()
    steps = [span["args"]["step"] for span in read_trace(recorder.path).spans]
    assert steps == [2, 3, 4, 8]


def test_what_was_recorded_is_kept_when_the_process_dies(tmp_path: Path) -> None:
    recorder = record(tmp_path / "worker-1.a.trace.json", "worker 1")
    deadline = time.monotonic() + 60
    while b'"step":3' not in (recorder.path.read_bytes() if recorder.path.exists() else b""):
        assert time.monotonic() < deadline, "nothing is written while the process runs"
        time.sleep(0.01)
    alive = recorder.path.read_bytes()
    recorder.write()
    assert len(read_trace(recorder.path).spans) == 3
    for cut in range(alive.index(b'"step":3') - 60, len(alive)):  # died in the midst of writing
        recorder.path.write_bytes(alive[:cut])
        left = read_trace(recorder.path)
        assert len(left.spans) >= 2
        assert (left.process, left.rank) == ("worker 1", 1)


def test_a_trace_says_what_is_run(tmp_path: Path) -> None:
    recorder = record(tmp_path / "worker-0.a.trace.json", "worker 0")
    recorder.describe(facts(2, 1e9))
    recorder.write()
    assert read_trace(recorder.path).about == facts(2, 1e9)


@pytest.mark.parametrize(("set_to", "nodes"), [(None, 3), (4, 2)])
def test_a_trace_says_on_how_many_nodes(set_to: int | None, nodes: int) -> None:
    """The last one may have fewer workers."""
    world = SimpleNamespace(size=5, local_size=2)
    training: Any = SimpleNamespace(
        world=world, config=Config(workers_per_node=set_to), user=SimpleNamespace(named=[])
    )
    facts = trace_facts(training)
    assert (facts["ranks"], facts["nodes"]) == (5, nodes)


def test_a_folder_is_read_by_session(tmp_path: Path) -> None:
    for name in ("worker-1.b", "worker-0.b", "server-0.b", "worker-0.a"):
        recorder = record(tmp_path / f"{name}.trace.json", name.partition(".")[0].replace("-", " "))
        recorder.write()
    (tmp_path / "other.json").write_text("not a trace")
    os.utime(tmp_path / "worker-0.a.trace.json", (1, 1))
    found = read_folder(tmp_path)
    assert [trace.session for trace in found] == ["a", "b", "b", "b"]
    assert {trace.process for trace in latest_session(found)} == {
        "worker 0",
        "worker 1",
        "server 0",
    }


def test_a_line_that_is_damaged_in_the_midst_is_an_error(tmp_path: Path) -> None:
    recorder = record(tmp_path / "worker-0.a.trace.json", "worker 0")
    recorder.write()
    lines = recorder.path.read_bytes().split(b"\n")
    lines[2] = lines[2][:-9]
    recorder.path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match="is damaged"):
        read_trace(recorder.path)


def test_a_disk_that_takes_nothing_is_told_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = record(tmp_path / "file" / "worker-0.a.trace.json", "worker 0")
    with pytest.raises(StorageError, match="cannot be written"):
        recorder.write()
