"""What one worker did in a few consecutive steps: read from a recorded trace, drawn by the report.

A timeline is a cut out of the Chrome trace of one worker: what it computed, what it sent and
received meanwhile, and where it stood still because a parameter had not come back yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from foreprop.engine.trace import BUCKET_REDUCED
from foreprop.errors import ConfigError

Lane = Literal["compute", "push", "reply", "reduce", "wait"]

SAME_TIME_S = 2e-6
"""Recorded times are good to about a microsecond: a smaller overlap is none."""

_LANES: Mapping[str, Lane] = {
    "forward": "compute",
    "backward": "compute",
    "push_sent": "push",
    "reply_received": "reply",
    BUCKET_REDUCED: "reduce",
    "wait": "wait",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """Something that took time; seconds count from the start of the timeline's window."""

    lane: Lane
    direction: str = ""
    """"forward" or "backward" for compute, empty otherwise."""
    layer: str
    """Layer name for compute, parameter name for what is sent, received and waited for."""
    layer_index: int
    """Position of the layer in the forward pass, from 0."""
    step: int
    start_s: float
    stop_s: float
    bytes: int = 0
    slice: int = -1
    """The slice's number, if it is about one slice."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and self.start_s <= self.stop_s < math.inf):
            raise ConfigError(
                f"start_s is {self.start_s} and stop_s is {self.stop_s} ({self.lane} of "
                f"{self.layer}); an event must not stop before it starts"
            )
        if self.layer_index < 0:
            raise ConfigError(f"layer_index is {self.layer_index}; it must be at least 0")

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Consecutive steps of one worker under one preset."""

    preset: str
    events: Sequence[TimelineEvent]

    @property
    def stop_s(self) -> float:
        return max((event.stop_s for event in self.events), default=0.0)


class StepSpan(NamedTuple):
    """A step from its first forward block, or the waiting that leads to it, to the next step.

    If the next step is not recorded, it ends with its last backward block.
    """

    step: int
    start_s: float
    stop_s: float
    wait_s: float
    """Seconds of the span in which at least one parameter was waited for."""


def step_spans(events: Sequence[TimelineEvent], *, floor_s: float = 0.0) -> list[StepSpan]:
    """The steps that have compute events, in order; none starts before `floor_s`.

    Waiting is counted where it happens, not by the step that it is labelled with: waiting between
    the last backward block of a step and the first forward block of the next belongs to the next.
    """
    compute: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.lane == "compute":
            first, last = compute.get(event.step, (math.inf, -math.inf))
            compute[event.step] = min(first, event.start_s), max(last, event.stop_s)
    waits = union((e.start_s, e.stop_s) for e in events if e.lane == "wait")
    steps = sorted(compute)
    starts: list[float] = []
    idle_since_s = floor_s
    for step in steps:
        first, last = compute[step]
        leading = (max(a, idle_since_s) for a, b in waits if b > idle_since_s and a < first)
        starts.append(min(first, min(leading, default=first)))
        idle_since_s = last
    stops = [
        starts[place + 1] if step + 1 in compute else compute[step][1]
        for place, step in enumerate(steps)
    ]
    return [
        StepSpan(
            step, start, stop, math.fsum(max(0.0, min(b, stop) - max(a, start)) for a, b in waits)
        )
        for step, start, stop in zip(steps, starts, stops, strict=False)
    ]


def timeline_from_trace(
    trace: Mapping[str, Any], *, first_step: int, steps: int = 2
) -> list[TimelineEvent]:
    """Cut `steps` steps out of one worker's Chrome trace (its "ts" and "dur" in microseconds).

    The window starts with the first forward event of `first_step`, or with the waiting that leads
    directly to it, and ends with the last forward or backward event of the last step. Whatever
    overlaps it is returned, clipped to it, with times relative to its start; so pushes and replies
    of the step before may be among it. Time waited inside a layer's forward or backward is taken
    out of that layer's compute event. Layers are numbered in the order of their first forward
    event in the file; a parameter belongs to the layer that its name starts with.

    Raises ConfigError if the trace lacks one of the steps.
    """
    events = parse_events(trace).events
    start_s, stop_s = _window(events, first_step, steps)
    clipped = [_clip(event, start_s, stop_s) for event in events]
    inside = [event for event in clipped if event is not None]
    waits = union((e.start_s, e.stop_s) for e in inside if e.lane == "wait")
    pieces = [piece for event in inside for piece in _without_waits(event, waits)]
    return sorted(pieces, key=lambda event: event.start_s)


class Parsed(NamedTuple):
    """The events of known categories, in seconds from the first: epoch times lose precision."""

    zero_us: float
    events: list[TimelineEvent]


def parse_events(trace: Mapping[str, Any]) -> Parsed:
    """Read one worker's trace; layers are numbered in the order of their first forward event."""
    raw = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X" and e.get("cat") in _LANES]
    raw.sort(key=lambda event: float(event["ts"]))
    zero_us = float(raw[0]["ts"]) if raw else 0.0
    indices: dict[str, int] = {}
    for event in raw:
        if event["cat"] == "forward":
            indices.setdefault(event["name"], len(indices))
    events = []
    for event in raw:
        args, lane = event.get("args", {}), _LANES[event["cat"]]
        start_s = (float(event["ts"]) - zero_us) / 1e6
        events.append(
            TimelineEvent(
                lane=lane,
                direction=event["cat"] if lane == "compute" else "",
                layer=event["name"],
                layer_index=_layer_index(event["name"], indices),
                step=int(args.get("step", -1)),
                start_s=start_s,
                stop_s=start_s + float(event.get("dur", 0)) / 1e6,
                bytes=int(args.get("bytes", 0)),
                slice=int(args.get("slice", -1)),
            )
        )
    return Parsed(zero_us, events)


def _layer_index(name: str, indices: dict[str, int]) -> int:
    """Index of the layer with the longest name that leads `name`; unknown layers come last."""
    prefix = name
    while prefix not in indices and "." in prefix:
        prefix = prefix.rpartition(".")[0]
    if prefix in indices:
        return indices[prefix]
    return indices.setdefault(name.rpartition(".")[0] or name, len(indices))


def _window(events: Sequence[TimelineEvent], first_step: int, steps: int) -> tuple[float, float]:
    wanted = range(first_step, first_step + steps)
    compute = [e for e in events if e.lane == "compute"]
    forward_steps = {e.step for e in compute if e.direction == "forward"}
    missing = [step for step in wanted if step not in forward_steps]
    if missing or not wanted:
        there = "none at all"
        if forward_steps:
            there = f"steps {min(forward_steps)} to {max(forward_steps)}"
        raise ConfigError(
            f"first_step is {first_step} and steps is {steps}, but the trace has no forward event "
            f"of the steps {missing}; it has {there}"
        )
    first_s = min(e.start_s for e in compute if e.step == first_step and e.direction == "forward")
    before = max((e.stop_s for e in compute if e.step < first_step), default=first_s)
    window = [e for e in events if e.lane == "wait" or e.step >= first_step]
    start_s = step_spans(window, floor_s=min(before, first_s))[0].start_s
    return start_s, max(e.stop_s for e in compute if e.step == wanted[-1])


def _clip(event: TimelineEvent, start_s: float, stop_s: float) -> TimelineEvent | None:
    start = max(event.start_s, start_s)
    stop = min(event.stop_s, stop_s)
    if stop - start < min(event.duration_s, SAME_TIME_S) or start > stop:
        return None
    return replace(event, start_s=start - start_s, stop_s=stop - start_s)


def _without_waits(
    event: TimelineEvent, waits: Sequence[tuple[float, float]]
) -> Iterator[TimelineEvent]:
    """The parts of a compute event that were not waiting; another event as it is."""
    start = event.start_s
    if event.lane == "compute":
        for wait_start, wait_stop in waits:
            if wait_stop <= start or wait_start >= event.stop_s:
                continue
            if wait_start > start:
                yield replace(event, start_s=start, stop_s=wait_start)
            start = wait_stop
        if start >= event.stop_s > event.start_s:
            return
    yield replace(event, start_s=start)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


SHAPES_LIMIT = 3000
"""Above this many shapes in one report, touching slices of a layer are drawn as one."""
_COMMON = ("lane", "row", "direction", "layer_index", "step")
"""What shapes must have in common to be drawn as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(TimelineEvent):
    """One rectangle: an event, or several of the same layer, lane, row and step."""

    row: int
    """Row within the lane, from 0: events that overlap lie in different rows."""
    names: tuple[str, ...]
    busy_s: float
    """Sum of the events' durations: at most the shape's, less where it spans a gap."""
    events: int = 1


def plan_shapes(
    timelines: Sequence[Timeline], *, gap_s: float, limit: int = SHAPES_LIMIT
) -> list[list[Shape]]:
    """The shapes of every timeline; merged if there would be more than `limit` of them.

    Slices are merged that overlap, touch, or lie less than `gap_s` apart: choose what the eye
    cannot see at the picture's scale.
    """
    panels = [_rows(timeline.events) for timeline in timelines]
    if sum(map(len, panels)) > limit:
        panels = [merge_shapes(shapes, gap_s=gap_s) for shapes in panels]
    return panels


def merge_shapes(shapes: Iterable[Shape], *, gap_s: float) -> list[Shape]:
    """Join neighbours in a row that belong to the same layer, direction and step."""
    merged: list[Shape] = []
    for shape in sorted(shapes, key=lambda s: (s.lane, s.row, s.start_s)):
        last = merged[-1] if merged else None
        is_one_run = (
            last is not None
            and all(getattr(last, name) == getattr(shape, name) for name in _COMMON)
            and shape.start_s - last.stop_s <= max(gap_s, SAME_TIME_S)
        )
        if last is None or not is_one_run:
            merged.append(shape)
            continue
        merged[-1] = replace(
            last,
            names=last.names + tuple(name for name in shape.names if name not in last.names),
            stop_s=max(last.stop_s, shape.stop_s),
            busy_s=last.busy_s + shape.busy_s,
            bytes=last.bytes + shape.bytes,
            events=last.events + shape.events,
        )
    return merged


def _rows(events: Iterable[TimelineEvent]) -> list[Shape]:
    """One shape per event, each in the first row of its lane that is free."""
    free_at: dict[Lane, list[float]] = {}
    shapes = []
    for event in sorted(events, key=lambda e: (e.start_s, e.layer_index)):
        rows = free_at.setdefault(event.lane, [])
        row = next((i for i, t in enumerate(rows) if t <= event.start_s + SAME_TIME_S), len(rows))
        if row == len(rows):
            rows.append(0.0)
        rows[row] = event.stop_s
        busy_s = event.duration_s
        shapes.append(Shape(**asdict(event), row=row, names=(event.layer,), busy_s=busy_s))
    return shapes
