"""matplotlib: how charts look, the systems' colours and marks, and the planner's curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from foreprop.model.whatif import WhatIf, value_text

INK, QUIET, GRID, CARD, WAIT = "#1b1d21", "#5c626b", "#dfe1e4", "#ffffff", "#c8102e"
"""report.css's colours in daylight; on the page they become its variables again."""
PNG_DPI = 160
_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": GRID,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "foreprop",
}


@dataclass(frozen=True, slots=True)
class Style:
    """How a system is drawn, in every chart: colour on a light and on a dark page, and mark."""

    light: str
    dark: str
    marker: str
    dashes: Literal["-", "--", ":"] = "-"


STYLES: Mapping[str, Style] = {
    "p3": Style("#2458b0", "#6ea5f5", "o"),
    "slicing": Style("#16805f", "#4dcda6", "s"),
    "kvstore": Style("#b8560f", "#f0a35e", "D"),
    "ddp": Style("#7a3e9d", "#c79bea", "^"),
    "ddp-tuned": Style("#a8468f", "#ec9fd8", "v", "--"),
    "mxnet-kvstore": Style("#86702a", "#d8c878", "P", ":"),
    "mxnet-p3": Style("#456473", "#9fbccb", "X", ":"),
}

Draw = Callable[[Figure], None]


@contextmanager
def drawn(draw: Draw, size_in: tuple[float, float]) -> Iterator[Figure]:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=size_in, layout="constrained")
        draw(figure)
        yield figure


# The planner's curves.
_PLAN_IN = (7.0, 4.2)
_MOST_TICKS = 9
_LABELS = {
    "rate": "rate of every node's link",
    "latency": "latency",
    "compute": "compute per step",
    "nodes": "nodes",
    "servers": "dedicated servers",
}
_PLAN_STYLES = {
    "ddp": STYLES["ddp"],
    "ddp dense": STYLES["ddp-tuned"],
    "ring": STYLES["slicing"],
    "hybrid": STYLES["mxnet-kvstore"],
    "p2p": STYLES["p3"],
    "ps": STYLES["kvstore"],
}
"""By name or architecture; the lab's for what it has, too."""


def draw_what_if(path: Path, title: str, curves: WhatIf) -> None:
    """Throughput by what may be another, a line for each architecture.

    ``title`` says what stays as it is; the name of ``path`` ends in the kind of picture.
    """
    with drawn(partial(_draw_curves, title, curves), _PLAN_IN) as figure:
        kept = {"Date": None} if path.suffix == ".svg" else None  # the same bytes each time
        figure.savefig(path, dpi=PNG_DPI, facecolor=CARD, metadata=kept)


def _draw_curves(title: str, curves: WhatIf, figure: Figure) -> None:
    ax = figure.subplots()
    values = [point.value for point in curves.points]
    for number, name in enumerate(curves.candidates):
        style = _PLAN_STYLES.get(name) or _PLAN_STYLES[name.partition(" ")[0]]
        ax.plot(
            values,
            [point.throughputs[number] for point in curves.points],
            color=style.light,
            marker=style.marker,
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
        ax.axvline(curves.asked, color=QUIET, linewidth=0.8, linestyle=":")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
