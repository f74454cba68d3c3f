"""From timeline events to the shapes of a picture: rows within lanes, and merging.

Pure arithmetic on times; `timeline_svg` turns the shapes into pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from foreprop.report.timeline import SAME_TIME_S, Lane, Timeline, TimelineEvent

SHAPES_LIMIT = 3000
"""Above this many shapes in one report, touching slices of a layer are drawn as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One rectangle: an event, or several of the same layer, lane, row and step."""

    lane: Lane
    row: int
    """Row within the lane, from 0: events that overlap lie in different rows."""
    direction: str
    names: tuple[str, ...]
    layer_index: int
    step: int
    start_s: float
    stop_s: float
    busy_s: float
    """Sum of the events' durations: at most the shape's, less where it spans a gap."""
    bytes: int
    events: int


def plan_shapes(
    timelines: Sequence[Timeline], *, gap_s: float, limit: int = SHAPES_LIMIT
) -> list[list[Shape]]:
    """The shapes of every timeline; merged if there would be more than `limit` of them.

    Merged are slices that overlap, touch, or lie less than `gap_s` apart: choose what the eye
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
        if merged and _joinable(merged[-1], shape, gap_s):
            merged[-1] = _join(merged[-1], shape)
        else:
            merged.append(shape)
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
        shapes.append(_shape(event, row))
    return shapes


def _shape(event: TimelineEvent, row: int) -> Shape:
    return Shape(
        lane=event.lane,
        row=row,
        direction=event.direction,
        names=(event.layer,),
        layer_index=event.layer_index,
        step=event.step,
        start_s=event.start_s,
        stop_s=event.stop_s,
        busy_s=event.duration_s,
        bytes=event.bytes,
        events=1,
    )


def _joinable(left: Shape, right: Shape, gap_s: float) -> bool:
    same = (left.lane, left.row, left.direction, left.layer_index, left.step) == (
        right.lane,
        right.row,
        right.direction,
        right.layer_index,
        right.step,
    )
    return same and right.start_s - left.stop_s <= max(gap_s, SAME_TIME_S)


def _join(left: Shape, right: Shape) -> Shape:
    return replace(
        left,
        names=left.names + tuple(name for name in right.names if name not in left.names),
        stop_s=max(left.stop_s, right.stop_s),
        busy_s=left.busy_s + right.busy_s,
        bytes=left.bytes + right.bytes,
        events=left.events + right.events,
    )
