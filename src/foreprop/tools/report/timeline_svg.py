"""The timeline picture: one SVG panel per preset, all on one time scale and in one palette.

This computes the places; templates/parts.html writes the elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from foreprop.tools.report.document import milliseconds, size
from foreprop.tools.report.timeline import (
    Lane,
    Shape,
    StepSpan,
    Timeline,
    merge_shapes,
    plan_shapes,
    step_spans,
    union,
)

PLOT_PX = 936
"""Width of the longest timeline; a shorter one ends as much earlier as it took less time."""

_MARGIN_PX = 16
_HEAD_PX = 30
_AXIS_PX = 26
_LANE_GAP_PX = 10
_SHAPE_MIN_PX = 0.8
_SEPARATED_FROM_PX = 3.0
_MERGE_GAP_PX = 0.5
_CHAR_PX = 6.4

_LANES: Mapping[Lane, tuple[str, str]] = {
    "compute": ("compute", "on this worker"),
    "push": ("push", "worker → servers"),
    "reply": ("reply", "servers → worker"),
    "reduce": ("all-reduce", "all workers"),
    "wait": ("wait", "for a parameter"),
}
_ROOMY_PX: Mapping[Lane, int] = {"compute": 36, "push": 36, "reply": 36, "reduce": 36, "wait": 24}
_ROW_PX, _ROW_LEAST_PX, _CROWDED_PX = 9, 2, 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Seconds to pixels, the same for every panel."""

    longest_s: float

    def x(self, time_s: float) -> float:
        return _MARGIN_PX + (time_s * PLOT_PX / self.longest_s if self.longest_s > 0 else 0.0)

    def seconds(self, px: float) -> float:
        return px * self.longest_s / PLOT_PX


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One preset's picture; `scale` and `layers` are the same for all panels."""

    timeline: Timeline
    shapes: Sequence[Shape]
    spans: Sequence[StepSpan]
    rows: Mapping[Lane, int]
    lane_px: Mapping[Lane, int]
    scale: Scale
    layers: Mapping[int, str]
    lanes: Mapping[Lane, tuple[str, str]]
    """The lanes that are drawn, with their names and meanings."""

    def top(self, lane: Lane) -> int:
        before = list(self.lanes)[: list(self.lanes).index(lane)]
        return _HEAD_PX + sum(self.lane_px[name] + _LANE_GAP_PX for name in before)

    @property
    def floor(self) -> int:
        return self.top("wait") + self.lane_px["wait"]

    # For the template (`panel` of parts.html).
    width_px: ClassVar = PLOT_PX + 2 * _MARGIN_PX

    @property
    def height_px(self) -> int:
        return self.floor + _AXIS_PX

    @property
    def summary(self) -> str:
        if not self.spans:
            return f"{self.timeline.preset}: no steps recorded"
        count = len(self.spans)
        waits = " and ".join(milliseconds(span.wait_s) for span in self.spans)
        steps = "1 step" if count == 1 else f"{count} steps"
        return f"{steps} in {milliseconds(self.timeline.stop_s)}, waiting {waits}"

    @property
    def marks(self) -> Iterator[Mark]:
        yield from _bands(self)
        yield from _axis(self)
        yield from (_shape(self, shape) for shape in self.shapes)
        yield from _labels(self)
        yield from _steps(self)
        yield from _finish(self)


def plan_panels(timelines: Sequence[Timeline]) -> list[Panel]:
    """Lay the timelines out with one time scale and one set of layers."""
    scale = Scale(longest_s=max((timeline.stop_s for timeline in timelines), default=0.0))
    shapes = plan_shapes(timelines, gap_s=scale.seconds(_MERGE_GAP_PX))
    rows = [
        {lane: max((s.row + 1 for s in drawn if s.lane == lane), default=1) for lane in _LANES}
        for drawn in shapes
    ]
    layers = layer_names(timelines)
    panels = []
    for timeline, panel_shapes, panel_rows in zip(timelines, shapes, rows, strict=True):
        used = {shape.lane for shape in panel_shapes}
        absent = {"reduce"} if "reduce" not in used else {"push", "reply"} - used
        lane_px = {}
        for lane, count in panel_rows.items():
            crowded_px = max(_CROWDED_PX, _ROW_LEAST_PX * count)
            lane_px[lane] = max(_ROOMY_PX[lane], min(_ROW_PX * count, crowded_px))
        panels.append(
            Panel(
                timeline=timeline,
                shapes=panel_shapes,
                spans=step_spans(timeline.events),
                rows=panel_rows,
                lane_px=lane_px,
                scale=scale,
                layers=layers,
                lanes={lane: words for lane, words in _LANES.items() if lane not in absent},
            )
        )
    return panels


def layer_names(timelines: Iterable[Timeline]) -> dict[int, str]:
    """Layer index to name, in forward order; a parameter's name stands in for its layer's."""
    events = [event for timeline in timelines for event in timeline.events]
    names: dict[int, str] = {}
    for event in sorted(events, key=lambda e: (e.layer_index, e.lane != "compute")):
        owner = "" if event.lane == "compute" else event.layer.rpartition(".")[0]
        names.setdefault(event.layer_index, owner or event.layer)
    return names


def layer_bytes(timelines: Iterable[Timeline]) -> dict[int, int]:
    """Each layer's bytes that go one way in one step, as far as the timelines show them."""
    totals: Counter[tuple[int, str, int, int]] = Counter()
    for number, timeline in enumerate(timelines):
        for event in timeline.events:
            if event.lane in ("push", "reply"):
                totals[number, event.lane, event.step, event.layer_index] += event.bytes
    largest: dict[int, int] = {}
    for (_, _, _, layer_index), total in totals.items():
        largest[layer_index] = max(total, largest.get(layer_index, 0))
    return largest


class Mark(NamedTuple):
    """An SVG element: its class, its places in pixels, its text and its tooltip."""

    element: str
    kind: str
    places: Mapping[str, float]
    words: str = ""
    tip: str = ""


class DrawnTimelines(NamedTuple):
    """What `timelines` of parts.html draws, on a page that has `palette_css`."""

    panels: Sequence[Panel]
    layers: Sequence[tuple[int, str, int | None]]
    """The legend's buttons: number, name, and bytes if they are known."""


def draw_timelines(timelines: Sequence[Timeline]) -> DrawnTimelines:
    sizes = layer_bytes(timelines)
    layers = [(index, name, sizes.get(index)) for index, name in layer_names(timelines).items()]
    return DrawnTimelines(plan_panels(timelines), layers)


def _bands(panel: Panel) -> Iterator[Mark]:
    """A pale track per lane, and a pale red band through all of them where the worker waits."""
    end = panel.scale.x(panel.timeline.stop_s)
    for lane in panel.lanes:
        yield _rect(_MARGIN_PX, panel.top(lane), end - _MARGIN_PX, panel.lane_px[lane], "track")
    waits = union((s.start_s, s.stop_s) for s in panel.shapes if s.lane == "wait")
    height = panel.floor - _HEAD_PX + 4
    x = panel.scale.x
    for start, stop in waits:
        yield _rect(x(start), _HEAD_PX - 4, x(stop) - x(start), height, "idle")


def _axis(panel: Panel) -> Iterator[Mark]:
    """Grid lines and time labels over the whole common scale, also beyond this panel's end."""
    longest_s = panel.scale.longest_s
    if longest_s <= 0:
        return
    every_s = tick_s(longest_s)
    yield _line(_MARGIN_PX, _MARGIN_PX + PLOT_PX, panel.floor + 5, panel.floor + 5, "axis")
    for number in range(int(longest_s / every_s * (1 + 1e-9)) + 1):
        x = panel.scale.x(number * every_s)
        yield _line(x, x, _HEAD_PX, panel.floor + 9, "grid")
        words = f"{number * every_s * 1e3:,.10g}" if number else "0 ms"
        yield _text(x, panel.floor + 21, words, "tick")


def tick_s(longest_s: float) -> float:
    """A round distance of time labels (1, 2 or 5 times a power of ten) that gives 6 to 14."""
    rough_s = longest_s / 12
    power = 10.0 ** math.floor(math.log10(rough_s))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough_s * 0.999)


def _shape(panel: Panel, shape: Shape) -> Mark:
    x = panel.scale.x(shape.start_s)
    width = max(panel.scale.x(shape.stop_s) - x, _SHAPE_MIN_PX)
    top, height = _row_box(panel, shape)
    names = "wait" if shape.lane == "wait" else f"c{shape.layer_index}"
    if shape.direction == "backward":
        names += " back"
    if width >= _SEPARATED_FROM_PX:
        names += " wide"
    return _rect(x, top, width, height, names, _tip(shape))


def _row_box(panel: Panel, shape: Shape) -> tuple[float, float]:
    rows = panel.rows[shape.lane]
    height = panel.lane_px[shape.lane] / rows
    gap = 1 if rows > 1 and height >= 5 else 0
    return panel.top(shape.lane) + shape.row * height, height - gap


def _tip(shape: Shape) -> str:
    names = ", ".join(shape.names[:3]) + (" ..." if len(shape.names) > 3 else "")
    stage = shape.direction or {"wait": "waiting for it"}.get(shape.lane, shape.lane)
    first = f"{names}: {stage}, step {shape.step}"
    parts = [milliseconds(shape.busy_s)]
    if shape.events > 1:
        parts.append(f"{shape.events} slices")
    elif shape.slice >= 0:
        parts.append(f"slice {shape.slice}")
    if shape.bytes:
        parts.append(size(shape.bytes))
    span = f"from {milliseconds(shape.start_s)} to {milliseconds(shape.stop_s)}"
    return f"{first}\n{', '.join(parts)}\n{span}"


def _labels(panel: Panel) -> Iterator[Mark]:
    for run in merge_shapes(panel.shapes, gap_s=panel.scale.seconds(2.0)):
        x, stop = panel.scale.x(run.start_s), panel.scale.x(run.stop_s)
        top, height = _row_box(panel, run)
        name = panel.layers[run.layer_index]
        if run.lane == "wait" and _fits(f"waiting for {name}", stop - x):
            name = f"waiting for {name}"
        if height >= 11 and _fits(name, stop - x):
            back = "on-back" if run.direction == "backward" else f"t{run.layer_index}"
            kind = "on-wait" if run.lane == "wait" else back
            yield _text((x + stop) / 2, top + height / 2 + 4, name, f"name {kind}")


def _fits(words: str, width_px: float) -> bool:
    return (len(words) + 1) * _CHAR_PX < width_px


def _steps(panel: Panel) -> Iterator[Mark]:
    """A line where each step begins, and above it the step's number and what it waited."""
    for span in panel.spans:
        x, stop = panel.scale.x(span.start_s), panel.scale.x(span.stop_s)
        yield _line(x, x, 4, panel.floor + 5, "step")
        number, waited = f"step {span.step}", f"waits {milliseconds(span.wait_s)}"
        if _fits(f"{number} ", stop - x):
            yield _text(x + 7, 15, number, "step-name")
        if _fits(f"{number}    {waited}", stop - x):
            x_waited = x + 7 + (len(number) + 2) * _CHAR_PX
            yield _text(x_waited, 15, waited, "step-wait")


def _finish(panel: Panel) -> Iterator[Mark]:
    """The end of this panel's window, and how much earlier than the slowest preset's it is."""
    end_s, longest_s = panel.timeline.stop_s, panel.scale.longest_s
    if not panel.spans:
        yield _text(_MARGIN_PX + 8, _HEAD_PX + 22, "no events were recorded", "step-name")
        return
    x = panel.scale.x(end_s)
    yield _line(x, x, 4, panel.floor + 5, "step")
    earlier = f"{milliseconds(longest_s - end_s)} earlier"
    width = panel.scale.x(longest_s) - x
    if _fits(f"{earlier}   ", width):
        y = panel.top("compute") + panel.lane_px["compute"] / 2
        yield _line(x + 4, x + width, y + 10, y + 10, "saved")
        yield _text(x + width / 2, y + 2, earlier, "saved-name")


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> Mark:
    places = {"x": x, "y": y, "width": max(width, 0.0), "height": height}
    return Mark("rect", kind, places, tip=tip)


def _line(x1: float, x2: float, y1: float, y2: float, kind: str) -> Mark:
    return Mark("line", kind, {"x1": x1, "x2": x2, "y1": y1, "y2": y2})


def _text(x: float, y: float, words: str, kind: str) -> Mark:
    return Mark("text", kind, {"x": x, "y": y}, words)
