"""Cutting a timeline out of a recorded trace."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.errors import ConfigError
from foreprop.tools.report.timeline import TimelineEvent, step_spans, timeline_from_trace
from tests.unit.report_example import event

EPOCH_US = 1_763_720_000_000_000.0


def span(cat: str, name: str, start_ms: float, stop_ms: float, step: int, size: int = 0) -> Any:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": EPOCH_US + start_ms * 1e3,
        "dur": (stop_ms - start_ms) * 1e3,
        "args": {"step": step, "bytes": size, "slice": 0, "priority": 0},
    }


def one_step(step: int, at_ms: float) -> list[Any]:
    """A step of 20 ms: a, b forward, b, a backward; the wait for b lies inside b's forward."""
    return [
        span("forward", "a", at_ms, at_ms + 4, step),
        span("forward", "b", at_ms + 4, at_ms + 10, step),
        span("wait", "b.weight", at_ms + 5, at_ms + 8, step),
        span("backward", "b", at_ms + 10, at_ms + 15, step),
        span("backward", "a", at_ms + 15, at_ms + 20, step),
        span("push_sent", "b.weight", at_ms + 15, at_ms + 22, step, size=700),
        span("reply_received", "b.weight", at_ms + 18, at_ms + 28, step, size=700),
        span("update", "b.weight", at_ms + 16, at_ms + 17, step),
    ]


def trace(*steps: list[Any]) -> dict[str, Any]:
    meta = {"ph": "M", "name": "process_name", "args": {"name": "worker 0"}}
    return {"traceEvents": [meta, *(item for step in steps for item in step)]}


def rows(events: list[TimelineEvent]) -> list[tuple[str, str, str, int, float, float]]:
    """What is drawn, in whole microseconds and sorted."""
    return sorted(
        (e.lane, e.direction, e.layer, e.step, round(e.start_s, 6), round(e.stop_s, 6))
        for e in events
    )


def test_a_window_of_one_step_has_exactly_what_overlaps_it() -> None:
    recorded = trace(one_step(0, 0), one_step(1, 20), one_step(2, 40))
    events = timeline_from_trace(recorded, first_step=1, steps=1)
    assert rows(events) == [
        ("compute", "backward", "a", 1, 0.015, 0.020),
        ("compute", "backward", "b", 1, 0.010, 0.015),
        ("compute", "forward", "a", 1, 0.000, 0.004),
        ("compute", "forward", "b", 1, 0.004, 0.005),
        ("compute", "forward", "b", 1, 0.008, 0.010),
        ("push", "", "b.weight", 0, 0.000, 0.002),
        ("push", "", "b.weight", 1, 0.015, 0.020),
        ("reply", "", "b.weight", 0, 0.000, 0.008),
        ("reply", "", "b.weight", 1, 0.018, 0.020),
        ("wait", "", "b.weight", 1, 0.005, 0.008),
    ]
    assert {e.layer: e.layer_index for e in events} == {"a": 0, "b": 1, "b.weight": 1}
    assert {e.bytes for e in events if e.lane == "push"} == {700}


def test_what_ddp_all_reduces_is_in_a_lane_of_its_own() -> None:
    step = [span("forward", "a", 0, 4, 1), span("bucket_reduced", "a.weight", 2, 9, 1, size=700)]
    events = timeline_from_trace(
        trace([*step, span("backward", "a", 4, 8, 1)]), first_step=1, steps=1
    )
    assert [(e.lane, e.start_s, e.bytes) for e in events if e.bytes] == [("reduce", 0.002, 700)]


def test_waiting_that_leads_to_the_first_forward_belongs_to_the_window() -> None:
    recorded = trace(one_step(0, 0), one_step(1, 30), one_step(2, 60))
    recorded["traceEvents"].append(span("wait", "a.weight", 22, 30, 1))
    events = timeline_from_trace(recorded, first_step=1)
    waits = [e for e in events if e.lane == "wait"]
    assert (waits[0].layer, waits[0].start_s) == ("a.weight", 0.0)
    assert waits[0].stop_s == pytest.approx(0.008)
    spans = step_spans(events)
    assert [s.step for s in spans] == [1, 2]
    assert [s.wait_s for s in spans] == pytest.approx([0.008 + 0.003, 0.003])
    assert [s.start_s for s in spans] == pytest.approx([0.0, 0.038])
    assert spans[-1].stop_s == pytest.approx(0.058)


def test_nested_and_unknown_parameters_find_a_layer() -> None:
    recorded = trace(one_step(0, 0))
    recorded["traceEvents"] += [
        span("push_sent", "b.attention.out.weight", 11, 12, 0),
        span("push_sent", "scale", 12, 13, 0),
        span("push_sent", "shift", 13, 14, 0),
    ]
    indices = {e.layer: e.layer_index for e in timeline_from_trace(recorded, first_step=0, steps=1)}
    assert indices["b.attention.out.weight"] == 1
    assert (indices["scale"], indices["shift"]) == (2, 3)


@pytest.mark.parametrize(("first_step", "steps"), [(2, 2), (7, 1), (0, 0)])
def test_a_step_that_was_not_recorded_is_named(first_step: int, steps: int) -> None:
    recorded = trace(one_step(0, 0), one_step(1, 20), one_step(2, 40))
    with pytest.raises(ConfigError, match=f"first_step is {first_step}.*steps 0 to 2"):
        timeline_from_trace(recorded, first_step=first_step, steps=steps)
    with pytest.raises(ConfigError, match="none at all"):
        timeline_from_trace({}, first_step=first_step, steps=steps)


def test_overlapping_waits_count_once() -> None:
    events = [
        event("compute", "a", 1.0, 2.0, direction="forward"),
        event("wait", "a.weight", 0.2, 0.9),
        event("wait", "a.bias", 0.5, 1.0),
    ]
    assert step_spans(events)[0].wait_s == pytest.approx(0.8)


@pytest.mark.parametrize("stop_s", [0.5, float("nan"), float("inf")])
def test_an_event_cannot_stop_before_it_starts(stop_s: float) -> None:
    with pytest.raises(ConfigError, match="stop_s"):
        event("push", "a.weight", 1.0, stop_s)
