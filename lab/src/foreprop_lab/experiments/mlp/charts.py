"""The comparison paper's figures 5 to 21 of our own measurements: epoch times and throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from foreprop.tools.report.charts import INK, QUIET, STYLES, Style
from foreprop_lab.experiments.chart import Chart, lighter
from foreprop_lab.experiments.mlp.run import MlpRecord
from foreprop_lab.experiments.mlp.training import DDP, P2P, RING

_STYLE_OF: Mapping[str, Style] = {
    P2P: STYLES["tensorflow"],
    "4ps": lighter(STYLES["tensorflow"], 0.25, "D", "--"),
    "2ps": lighter(STYLES["tensorflow"], 0.45, "s", "-."),
    "1ps": lighter(STYLES["tensorflow"], 0.6, "h", ":"),
    RING: STYLES["ring"],
    DDP: STYLES["ddp"],
}
"""Servers and peers have one preset and so one hue: fewer servers are lighter."""
_PRESET = "tensorflow"
_TITLES = {P2P: "peer to peer", RING: "ring all-reduce", DDP: "DistributedDataParallel"}
_PANEL_IN = (4.2, 3.2)
_COLUMNS = 3

Draw = Callable[[Axes, str, Sequence[MlpRecord]], None]


def epoch_chart(records: Sequence[MlpRecord]) -> Chart:
    """A panel per system: measured, and by both models (its 5, 7, 8, 10, 13, 14, 17 and 19)."""
    return _panels(records, _draw_epochs)


def throughput_chart(records: Sequence[MlpRecord]) -> Chart:
    """A panel per system: measured, refined, and ideal (its 6, 9, 11, 15 and 18)."""
    return _panels(records, _draw_throughput)


def comparison_chart(records: Sequence[MlpRecord]) -> Chart:
    """All systems' measured epoch times and throughputs (its 20 and 21)."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for system, points in _by_system(records).items():
            style = _STYLE_OF[system]
            workers = [p.workers for p in points]
            for ax, values in (
                (left, [p.epoch_s for p in points]),
                (right, [p.images_per_s for p in points]),
            ):
                ax.plot(
                    workers,
                    values,
                    color=style.light,
                    marker=style.marker,
                    markersize=5,
                    linestyle=style.dashes,
                    label=system if system in (RING, DDP) else f"{system} ({_PRESET})",
                )
        _finish(left, "epoch time, measured", "seconds")
        _finish(right, "throughput, measured", "images/s")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))

    return Chart(whole=draw, whole_in=(2 * _PANEL_IN[0], _PANEL_IN[1] + 0.4), parts=[])


def chart_data(records: Sequence[MlpRecord]) -> bytes:
    """The charts' numbers, as JSON."""
    return msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n"


def _by_system(records: Sequence[MlpRecord]) -> dict[str, list[MlpRecord]]:
    found: dict[str, list[MlpRecord]] = {}
    for record in sorted(records, key=lambda r: r.workers):
        found.setdefault(record.system, []).append(record)
    return found


def _panels(records: Sequence[MlpRecord], draw_panel: Draw) -> Chart:
    by_system = _by_system(records)
    columns = min(_COLUMNS, len(by_system))
    rows = -(-len(by_system) // columns)

    def draw(figure: Figure) -> None:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, (system, points) in zip(axes, by_system.items(), strict=False):
            draw_panel(ax, system, points)
        for ax in axes[len(by_system) :]:
            ax.set_axis_off()
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))

    size_in = (_PANEL_IN[0] * columns, _PANEL_IN[1] * rows + 0.5)
    return Chart(whole=draw, whole_in=size_in, parts=[])


def _draw_epochs(ax: Axes, system: str, points: Sequence[MlpRecord]) -> None:
    """Draw a system's epoch times, without the literal formulas, which are up to b times off."""
    _draw_measured(ax, system, points, [(p.epoch_s, p.epoch_s / p.step_s.median) for p in points])
    workers = [p.workers for p in points]
    refined = [p.predicted_epoch_s.refined for p in points]
    ax.plot(workers, refined, color=INK, linestyle="-", linewidth=1.2, label="refined model")
    kind = [
        (p.workers, p.predicted_epoch_s.published_in_batches)
        for p in points
        if p.predicted_epoch_s.published_in_batches is not None
    ]
    ax.plot(
        [w for w, _ in kind],
        [seconds for _, seconds in kind],
        color=QUIET,
        linestyle="--",
        linewidth=1.2,
        label="published formulas, n in batches",
    )
    _finish(ax, f"{_TITLES.get(system, system)}: epoch time", "seconds")


def _draw_throughput(ax: Axes, system: str, points: Sequence[MlpRecord]) -> None:
    images = [p.images_per_s * p.epoch_s for p in points]
    measured = [(p.images_per_s, 0.0) for p in points]
    _draw_measured(ax, system, points, measured)
    workers = [p.workers for p in points]
    refined = [n / p.predicted_epoch_s.refined for n, p in zip(images, points, strict=True)]
    ax.plot(workers, refined, color=INK, linestyle="-", linewidth=1.2, label="refined model")
    ideal = [p.workers * p.batch / p.compute_s for p in points]
    ax.plot(workers, ideal, color=QUIET, linestyle=":", linewidth=1.2, label="ideal: w b / compute")
    _finish(ax, f"{_TITLES.get(system, system)}: throughput", "images/s")


def _draw_measured(
    ax: Axes, system: str, points: Sequence[MlpRecord], values: Sequence[tuple[float, float]]
) -> None:
    """Draw pairs of a value and its change per second of a step; bars are from p10 to p90."""
    style = _STYLE_OF[system]
    bars = [(p.step_s, per_s) for p, (_, per_s) in zip(points, values, strict=True)]
    low = [per_s * (step.median - step.p10) for step, per_s in bars]
    high = [per_s * (step.p90 - step.median) for step, per_s in bars]
    ax.errorbar(
        [p.workers for p in points],
        [value for value, _ in values],
        yerr=(low, high),
        color=style.light,
        marker=style.marker,
        markersize=5.5,
        linestyle="",
        capsize=2,
        zorder=3,
        label="measured",
    )


def _finish(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title)
    ax.set_xlabel("workers")
    ax.set_ylabel(unit)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
