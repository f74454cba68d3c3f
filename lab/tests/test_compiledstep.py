"""The picture of a compiled step: what lies between its waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreprop_lab.experiments.compiledstep import draw_step, with_layers


def _span(kind: str, name: str, start: float, stop: float, step: int = 3) -> dict[str, Any]:
    args = {"step": step, "bytes": 0, "slice": -1}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": stop - start, "args": args}


EVENTS = [
    _span("backward", "last", 1.0, 50.0),  # as recorded: from the end of the step before
    _span("wait", "first.weight", 10.0, 20.0),
    _span("wait", "last.weight", 25.0, 30.0),
    _span("backward", "first", 50.0, 60.0),
    _span("push_sent", "last.weight", 51.0, 55.0),
    _span("wait", "first.weight", 62.0, 70.0, step=4),
]


def test_layers_lie_between_their_waits_and_backward_begins_behind_the_last() -> None:
    got = [(e["cat"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in with_layers(EVENTS)]
    assert got == [
        ("forward", "first", 10.0, 25.0),
        ("forward", "last", 25.0, 30.0),
        ("backward", "last", 30.0, 50.0),
        ("backward", "first", 50.0, 60.0),
        *((e["cat"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in EVENTS[1:3]),
        ("push_sent", "last.weight", 51.0, 55.0),
        ("wait", "first.weight", 62.0, 70.0),
    ]


@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
def test_a_step_is_drawn(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    trace.write_text(json.dumps({"traceEvents": EVENTS}))
    draw_step(trace, 3, "compiled", picture)
    assert "compiled: 1 step" in picture.read_text()
    assert picture.with_suffix(".png").stat().st_size > 1000
