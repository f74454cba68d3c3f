"""Traces are files that Chrome's and Perfetto's viewers open."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from foreprop.observe import trace
from foreprop.observe.trace import TraceRecorder, merge_traces


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
        recorder.span("updated", "b", recorder.now_ns(), step=4, size_bytes=8, slice_=2, priority=1)

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
    assert wait["args"] == {"step": 3, "bytes": 0, "slice": -1, "priority": 0}
    assert updated["args"] == {"step": 4, "bytes": 8, "slice": 2, "priority": 1}
    assert updated["dur"] >= 0
    assert names[wait["tid"]] == threading.current_thread().name
    assert names[updated["tid"]] == "a thread that has ended"


def test_traces_of_a_folder_are_laid_into_one_file(tmp_path: Path) -> None:
    for number in (1, 0):
        recorder = TraceRecorder(tmp_path / f"rank-{number}.trace.json", f"rank {number}", number)
        recorder.span("wait", "p", recorder.now_ns(), step=1)
        recorder.write()
    (tmp_path / "other.json").write_text("not a trace")
    target = tmp_path / "merged.json"
    for _ in range(2):  # the result is not taken for one of its parts
        assert merge_traces(tmp_path, target) == len(read(target)) == 6
    assert [event["pid"] for event in read(target) if event["ph"] == "X"] == [0, 1]


def test_a_long_run_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_EVENTS_LIMIT", 3)
    recorder = TraceRecorder(tmp_path / "t.trace.json", "rank 0", 0)
    for step in range(5):
        recorder.span("wait", "p", recorder.now_ns(), step=step)
    recorder.write()
    assert [e["args"]["step"] for e in read(recorder.path) if e["ph"] == "X"] == [0, 1, 2]
