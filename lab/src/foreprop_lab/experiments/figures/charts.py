"""How the lab's figures are drawn.

All numbers come from `curves` or from timelines; nothing here computes a result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from foreprop.tools.report.charts import CARD, INK, QUIET, WAIT, Draw, style_of
from foreprop.tools.report.document import LIGHT_RAMP, ramp_colour
from foreprop.tools.report.timeline import Lane, Shape, Timeline
from foreprop.tools.report.timeline_svg import Panel, plan_panels
from foreprop_lab.experiments.chart import PART_IN, Chart, with_gaps
from foreprop_lab.experiments.figures.comparison import in_order, model_name
from foreprop_lab.experiments.figures.curves import (
    THROUGHPUT_LABEL,
    Axis,
    Curve,
    ThroughputPanel,
    UtilisationPanel,
)

LIMIT = "limit"


_PANEL_IN = (4.9, 3.3)


def throughput_chart(panels: Sequence[ThroughputPanel]) -> Chart:
    """Throughput panels in two columns, with the legend below."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    systems = in_order(curve.system for panel in panels for curve in panel.curves)

    def draw(figure: Figure) -> None:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, panel in zip(axes, panels, strict=False):
            _draw_throughput(ax, panel)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        handles = [*(_handle(name) for name in systems), _limit_handle(), _cpu_bound_handle()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5))

    return Chart(
        whole=draw,
        whole_in=(_PANEL_IN[0] * columns, _PANEL_IN[1] * rows + 0.5),
        parts=[(_throughput_summary(panel), _throughput_part(panel)) for panel in panels],
        systems=systems,
    )


def _throughput_part(panel: ThroughputPanel) -> Draw:
    return lambda figure: _draw_throughput(figure.subplots(), panel)


def _throughput_summary(panel: ThroughputPanel) -> str:
    systems = ", ".join(curve.system for curve in panel.curves)
    return f"{panel.title}: throughput by {panel.axis.label}, of {systems} and the limit"


def _handle(system: str) -> Line2D:
    style = style_of(system)
    return Line2D(
        [], [], color=style.light, marker=style.marker, linestyle=style.dashes, label=system
    )


def _limit_handle() -> Line2D:
    return Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label=LIMIT)


def _cpu_bound_handle() -> Line2D:
    return Line2D(
        [], [], color=QUIET, marker="o", markerfacecolor=CARD, linestyle="", label="CPU-bound"
    )


def _draw_throughput(ax: Axes, panel: ThroughputPanel) -> None:
    ax.set_title(panel.title)
    ax.set_ylabel(THROUGHPUT_LABEL)
    xs, ys = zip(*panel.limit, strict=True)
    measured = {point.x for curve in panel.curves for point in curve.points}
    for curve in reversed(panel.curves):  # p3 is first, and belongs on top
        _draw_curve(ax, curve, measured)
    ax.plot(xs, ys, color=INK, linestyle=(0, (4, 2)), linewidth=1.2, zorder=5)
    _draw_axis(ax, panel.axis)
    highest = max([*ys, *(p.high for curve in panel.curves for p in curve.points)])
    ax.set_ylim(0, highest * 1.08)
    _label_cpu_bound(ax, panel.curves)


def _draw_curve(ax: Axes, curve: Curve, measured: Iterable[float]) -> None:
    """Draw a line, error bars from p10 to p90, and marks, hollow where the CPUs were the limit."""
    style, points = style_of(curve.system), curve.points
    colour, front = style.light, curve.system == "p3"
    xs, ys = [p.x for p in points], [p.throughput for p in points]
    line = with_gaps(zip(xs, ys, strict=True), measured)
    ax.plot(*line, color=colour, linestyle=style.dashes, linewidth=1.9 if front else 1.3)
    ax.errorbar(
        xs,
        ys,
        yerr=([p.throughput - p.low for p in points], [p.high - p.throughput for p in points]),
        fmt="none",
        color=colour,
        ecolor=colour,
        elinewidth=0.9,
        capsize=2,
        capthick=0.9,
        zorder=2.5,
    )
    for hollow in (False, True):
        chosen = [p for p in points if p.cpu_bound == hollow]
        ax.plot(
            [p.x for p in chosen],
            [p.throughput for p in chosen],
            color=colour,
            marker=style.marker,
            markersize=5.5,
            markerfacecolor=CARD if hollow else colour,
            markeredgewidth=1.2,
            linestyle="",
            zorder=4 if front else 3,
        )


def _draw_axis(ax: Axes, axis: Axis) -> None:
    ax.set_xlabel(axis.label)
    if axis.logarithmic:
        ax.set_xscale("log", base=2 if max((x for x, _ in axis.ticks), default=0) < 1000 else 10)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.margins(x=0.09)  # room for words below the outer marks
    if axis.ticks:
        ax.set_xticks([x for x, _ in axis.ticks], [label for _, label in axis.ticks])
    if axis.second_ticks:
        _draw_second_axis(ax, axis)
    if axis.mark is not None:
        x, words = axis.mark
        ax.axvline(x, color=QUIET, linewidth=0.8, linestyle=":")
        ax.annotate(
            words,
            (x, 0.04),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color=QUIET,
            fontsize=8,
        )


def _draw_second_axis(ax: Axes, axis: Axis) -> None:
    above = ax.secondary_xaxis("top")
    above.set_xticks([x for x, _ in axis.second_ticks], [label for _, label in axis.second_ticks])
    above.xaxis.set_minor_locator(NullLocator())
    above.tick_params(length=2, pad=1, labelsize=8)
    above.set_xlabel(axis.second_label, fontsize=8, labelpad=3)
    above.spines["top"].set_visible(False)


def _label_cpu_bound(ax: Axes, curves: Sequence[Curve]) -> None:
    """Write that runs are CPU-bound below the lowest hollow mark of each place."""
    lowest: dict[float, float] = {}
    for point in (p for curve in curves for p in curve.points if p.cpu_bound):
        lowest[point.x] = min(point.low, lowest.get(point.x, point.low))
    for x, y in lowest.items():
        ax.annotate(
            "CPU-bound",
            (x, y),
            xytext=(0, -6),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=7.5,
            color=QUIET,
            annotation_clip=False,
        )


_UTILISATION_COLUMNS = 3


def utilisation_chart(panels: Sequence[UtilisationPanel]) -> Chart:
    """Outbound above inbound utilisation, in a column per system, a few of them side by side."""
    columns = min(_UTILISATION_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(2 * rows, columns, squeeze=False, sharex="row", sharey=True)
        for number, panel in enumerate(panels):
            row, column = divmod(number, columns)
            _draw_utilisation(list(grid[2 * row : 2 * row + 2, column]), panel)
        for number in range(len(panels), rows * columns):
            row, column = divmod(number, columns)
            for ax in grid[2 * row : 2 * row + 2, column]:
                ax.set_axis_off()

    return Chart(
        whole=draw,
        whole_in=(_PANEL_IN[0] * columns, 3.6 * rows),
        parts=[
            (
                f"{_whose(panel)}: share of the link in use, outbound and inbound",
                _utilisation_part(panel),
            )
            for panel in panels
        ],
        part_in=(PART_IN[0], 3.6),
    )


def _whose(panel: UtilisationPanel) -> str:
    return f"{model_name(panel.model)}, {panel.system}"


def _utilisation_part(panel: UtilisationPanel) -> Draw:
    return lambda figure: _draw_utilisation(
        list(figure.subplots(2, 1, sharex=True, sharey=True)), panel
    )


def _draw_utilisation(axes: Sequence[Axes], panel: UtilisationPanel) -> None:
    colour = style_of(panel.system).light
    directions = (("outbound", panel.sent_share), ("inbound", panel.received_share))
    axes[0].set_title(_whose(panel))
    for ax, (direction, shares) in zip(axes, directions, strict=True):
        ax.stairs(shares, panel.seconds, fill=True, color=colour, alpha=0.75, linewidth=0)
        ax.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
        ax.set_ylim(0, 1.3)
        ax.set_yticks([0, 0.5, 1.0])
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:.0f}%"))
        ax.set_xlim(0, panel.seconds[-1])
        ax.set_ylabel(direction)
        in_use = _mean(shares, panel.seconds)
        words = f"in use: {in_use * 100:.0f}% on average"
        ax.text(0.99, 0.97, words, transform=ax.transAxes, ha="right", va="top", fontsize=8)
    axes[-1].set_xlabel("seconds")


def _mean(shares: Sequence[float], seconds: Sequence[float]) -> float:
    """The mean weighted by time, as the intervals differ a little in length."""
    spans = [stop - start for start, stop in itertools.pairwise(seconds)]
    weighted = sum(share * span for share, span in zip(shares, spans, strict=True))
    return weighted / sum(spans) if spans else 0.0


_LANES: Mapping[Lane, float] = {
    "compute": 1.0,
    "push": 1.3,
    "reply": 1.3,
    "reduce": 1.3,
    "wait": 0.6,
}
_LANE_GAP = 0.25
_TIMELINE_COLOURS = (
    "a colour is a layer, from dark, the first, to bright, the last; "
    "pale: backward pass; red: waiting for a parameter"
)


def timeline_chart(timelines: Sequence[Timeline]) -> Chart:
    """What one worker did, in a row of panels per system; the page draws its own timelines."""
    panels = plan_panels(timelines)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for ax, panel in zip(axes, panels, strict=True):
            _draw_timeline(ax, panel)
        axes[-1].set_xlabel(f"seconds      ({_TIMELINE_COLOURS})")

    return Chart(whole=draw, whole_in=(10.0, 2.7 * len(panels) + 0.4), parts=[])


def _draw_timeline(ax: Axes, panel: Panel) -> None:
    ax.set_title(f"{panel.timeline.preset}: {panel.summary}")
    ax.grid(visible=False)
    tops = _lane_tops(panel)
    middles = [top + _LANES[lane] / 2 for lane, top in tops.items()]
    ax.set_yticks(middles, [name for name, _ in panel.lanes.values()])
    ax.tick_params(left=False)
    ax.set_ylim(tops["wait"] + _LANES["wait"] + 0.1, -0.1)
    ax.set_xlim(0, panel.scale.longest_s)
    for colour, shapes in _by_colour(panel).items():
        boxes = [_box(panel, shape, tops) for shape in shapes]
        # An edge keeps thin slices visible; in their own colour it draws no grid of lines.
        ax.add_collection(PolyCollection(boxes, facecolors=colour, edgecolors=colour, lw=0.25))
    for span in panel.spans:
        ax.axvline(span.start_s, color=INK, linewidth=0.8)


def _lane_tops(panel: Panel) -> dict[Lane, float]:
    tops, top = dict[Lane, float](), 0.0
    for lane in panel.lanes:
        tops[lane] = top
        top += _LANES[lane] + _LANE_GAP
    return tops


def _by_colour(panel: Panel) -> dict[str, list[Shape]]:
    places = {index: i for i, index in enumerate(sorted(panel.layers))}
    last = max(len(places) - 1, 1)
    shapes: dict[str, list[Shape]] = {}
    for shape in panel.shapes:
        colour = ramp_colour(LIGHT_RAMP, places[shape.layer_index] / last)
        if shape.direction == "backward":
            colour = ramp_colour((CARD, colour), 0.45)
        shapes.setdefault(WAIT if shape.lane == "wait" else colour, []).append(shape)
    return shapes


def _box(panel: Panel, shape: Shape, tops: Mapping[Lane, float]) -> list[tuple[float, float]]:
    height = _LANES[shape.lane] / panel.rows[shape.lane]
    top = tops[shape.lane] + shape.row * height
    left, right, bottom = shape.start_s, shape.stop_s, top + height * 0.96
    return [(left, top), (right, top), (right, bottom), (left, bottom)]
