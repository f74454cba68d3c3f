"""The planner's curves, drawn by matplotlib."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from foreprop.model.whatif import WhatIf, value_text
from foreprop.report.style import INK, QUIET, save, style_of

_PLAN_IN = (7.0, 4.2)
_MOST_TICKS = 9
_LABELS = {
    "rate": "rate of every node's link",
    "latency": "latency",
    "compute": "compute per step",
    "nodes": "nodes",
    "servers": "dedicated servers",
}


def draw_what_if(path: Path, title: str, curves: WhatIf) -> None:
    """Throughput by what may be another, a line for each architecture.

    ``title`` says what stays as it is; the name of ``path`` ends in the kind of picture.
    """
    save(partial(_draw_curves, title, curves), _PLAN_IN, path)


def _draw_curves(title: str, curves: WhatIf, figure: Figure) -> None:
    ax = figure.subplots()
    values = [point.value for point in curves.points]
    for number, name in enumerate(curves.candidates):
        style = style_of("ps" if name.startswith("ps ") else name)
        ax.plot(
            values,
            [point.throughputs[number] for point in curves.points],
            color=style.light,
            marker=style.marker,
            linestyle=style.dashes,
            markersize=4.5,
            linewidth=1.9 if name == "p2p p3" else 1.3,
            label=name,
        )
    ideal = [point.ideal for point in curves.points]
    ax.plot(values, ideal, color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="ideal")
    ax.set_title(title)
    ax.set_xlabel(_LABELS[curves.variable])
    ax.set_ylabel(f"{curves.throughput_unit}, all workers")
    ax.set_ylim(0, 1.08 * max([*ideal, *(max(p.throughputs) for p in curves.points)]))
    if curves.variable != "servers" and values[0] > 0 and values[-1] / values[0] > 4:
        ax.set_xscale("log")
    ticks = values[:: -(-len(values) // _MOST_TICKS)]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [value_text(curves.variable, value) for value in ticks])
    ax.margins(x=0.07)
    if curves.asked is not None and values[0] < curves.asked < values[-1]:
        ax.axvline(
            curves.asked,
            color=QUIET,
            linewidth=0.8,
            linestyle=":",
            label=f"asked: {value_text(curves.variable, curves.asked)}",
        )
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
