"""Parallax's Figs. 12 and 13, with crosses where the paper says a number.

    python -m foreprop_lab.experiments.papers.parallaxcharts lab/docs/results

This draws both anew from parallax.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foreprop.tools.report.charts import INK, QUIET, STYLES, WAIT, save, style_of
from foreprop_lab.experiments.chart import lighter
from foreprop_lab.experiments.papers.parallaxtables import (
    FORWARD,
    HOROVOD,
    HYBRID,
    MPI,
    NORMALISED,
    PS,
    PUBLISHED_WORKERS,
    SYSTEM,
    Point,
    curve,
    published_throughput,
    read_points,
)

LABELS = {
    HYBRID: "hybrid (Parallax)",
    PS: "servers (TensorFlow's)",
    MPI: "all-reduce, rows gathered",
    FORWARD: "p3, with relays",
    HOROVOD: "Horovod of 2018",
}
_STYLE = {**SYSTEM, HOROVOD: "horovod"}


def draw_throughput(points: Sequence[Point], figure: Figure) -> None:
    """Fig. 12: a panel for each model, crosses where the paper says a number."""
    models = list(dict.fromkeys(point.model for point in points))
    columns = min(2, len(models))
    grid = figure.subplots(-(-len(models) // columns), columns, squeeze=False)
    for axes, model in zip(grid.flat, models, strict=False):
        _draw_model(axes, model, points)
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    handles, labels = grid.flat[0].get_legend_handles_labels()
    for axes in grid.flat[1 : len(models)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _draw_model(axes: Axes, model: str, points: Sequence[Point]) -> None:
    published = published_throughput(model)
    for system, label in LABELS.items():
        found = curve(points, model, system)
        style = style_of(_STYLE[system])
        if found:
            axes.plot(
                [point.workers for point in found],
                [point.throughput / 1e3 for point in found],
                color=style.light,
                marker=style.marker,
                linestyle=style.dashes,
                label=label,
            )
        if system in published:
            axes.plot(
                PUBLISHED_WORKERS,
                published[system] / 1e3,
                color=style.light,
                marker="x",
                markersize=9,
                markeredgewidth=2,
                linestyle="",
                label=f"{label}, published",
            )
    unit = next(point.unit for point in points if point.model == model)
    axes.set(title=model, xlabel="workers", ylabel=f"thousand {unit}/s", ylim=(0, None))
    _workers_ticks(axes, points)


def _workers_ticks(axes: Axes, points: Sequence[Point]) -> None:
    axes.set_xticks(sorted({point.workers for point in points}))


_MARKERS = {"ResNet-50": "s", "InceptionV3": "D", "LM": "o", "NMT": "^"}


def draw_scaling(points: Sequence[Point], figure: Figure) -> None:
    """Fig. 13: Parallax's throughput over one worker's, crosses where the paper says a number."""
    axes = figure.subplots()
    most = max(point.workers for point in points)
    axes.plot([0, most], [0, most], color=QUIET, linestyle=":", label="as many as workers")
    for number, model in enumerate(dict.fromkeys(point.model for point in points)):
        found = curve(points, model, HYBRID) or curve(points, model, MPI)
        style = lighter(STYLES["hybrid"], 0.18 * number, _MARKERS[model], "-")
        axes.plot(
            [point.workers for point in found],
            [point.normalised for point in found],
            color=style.light,
            marker=style.marker,
            label=model,
        )
        published = NORMALISED[model]
        axes.plot(PUBLISHED_WORKERS, published, color=WAIT, marker="x", linestyle="")
        axes.annotate(
            f"{model}: {published:g}",
            (PUBLISHED_WORKERS, published),
            xytext=(6, -3),
            textcoords="offset points",
            color=INK,
            fontsize=8,
            annotation_clip=False,
        )
    axes.plot([], [], color=WAIT, marker="x", linestyle="", label="published")
    axes.set(
        xlabel="workers", ylabel="throughput over one worker's", xlim=(0, None), ylim=(0, None)
    )
    _workers_ticks(axes, points)
    axes.legend()


def draw(folder: Path) -> None:
    """Draw parallax-throughput and parallax-scaling from parallax.json."""
    points = read_points(folder / "parallax.json")
    for name, drawing, size_in in (
        ("parallax-throughput", draw_throughput, (8.5, 6.6)),
        ("parallax-scaling", draw_scaling, (6.4, 4.2)),
    ):
        paths = [folder / f"{name}.{suffix}" for suffix in ("svg", "png")]
        save(partial(drawing, points), size_in, *paths)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
