"""How every chart looks, and the planner's curves: drawn by matplotlib.

Each system has one colour, mark and dash. Colours were searched for so that also protan and deutan
viewers tell them apart, on a light and on a dark page; `lab/tests/test_style.py` computes
it. Variants of a system have its colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from foreprop.plan.whatif import WhatIf, value_text

INK, QUIET, GRID, CARD, WAIT = "#1b1d21", "#5c626b", "#dfe1e4", "#ffffff", "#c8102e"
"""report.css's colours of a light page; on the page they become its variables again."""
DARK_INK, DARK_CARD = "#e9ebee", "#1a1d22"
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


Dashes = Literal["-", "--", ":", "-."]


@dataclass(frozen=True, slots=True)
class Style:
    """How a system is drawn, in every chart: colour on a light and on a dark page, and mark."""

    light: str
    dark: str
    marker: str
    dashes: Dashes = "-"


STYLES: Mapping[str, Style] = {
    "p3": Style("#2458b0", "#6ea5f5", "o"),
    "ddp": Style("#824b10", "#ff5f2c", "^"),
    "ring": Style("#2ca95f", "#50e698", "p"),
    "kvstore": Style("#4d3164", "#a02aff", "D"),
    "slicing": Style("#a29316", "#ffff43", "s"),
    "hybrid": Style("#257fa4", "#2c6e9d", "h"),
    "wfbp": Style("#691011", "#cb3035", "<"),
    "tensorflow": Style("#3d6a43", "#ceff83", ">"),
    "mxnet-kvstore": Style("#4b4e53", "#9fa2a7", "P", ":"),
    "mxnet-p3": Style("#83868b", "#696d73", "X", ":"),
}
OTHER = Style("#68717c", "#99a3af", "*")


def _variant(of: str, marker: str, dashes: Dashes) -> Style:
    return replace(STYLES[of], marker=marker, dashes=dashes)


VARIANTS: Mapping[str, Style] = {
    "ddp-tuned": _variant("ddp", "v", "--"),
    "ddp-dense": _variant("ddp", "v", "--"),
    "ddp-sparse": _variant("ddp", "1", "-."),
    "horovod": _variant("ddp", "2", ":"),
    "torchft": _variant("ddp", "v", "--"),
    "ring-tuned": _variant("ring", "*", "--"),
    "p3-fine": _variant("p3", "d", "--"),
    "p3-servers": _variant("p3", "d", "-."),
    "p3-2019": _variant("p3", "H", ":"),
    "p3-elastic": STYLES["p3"],
    "p2p": STYLES["p3"],
    "ps": _variant("p3", "8", "--"),
}
"""Systems that are others with something changed: they have those' colours, other marks, dashes."""


def style_of(system: str) -> Style:
    """The style for a system's name, as ``p3``, ``p3@200000`` or ``p2p p3`` (its preset counts)."""
    words = system.replace("@", " ").split()
    for name in (system.replace(" ", "-"), *reversed(words)):
        if name in STYLES or name in VARIANTS:
            return STYLES.get(name) or VARIANTS[name]
    return OTHER


Draw = Callable[[Figure], None]


@contextmanager
def drawn(draw: Draw, size_in: tuple[float, float]) -> Iterator[Figure]:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=size_in, layout="constrained")
        draw(figure)
        yield figure


def save(draw: Draw, size_in: tuple[float, float], *paths: Path) -> None:
    """Save a picture of the kind that each path's ending says, with the same bytes each time."""
    with drawn(draw, size_in) as figure:
        for path in paths:
            kept = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=PNG_DPI, facecolor=CARD, metadata=kept)


# The curves of `foreprop plan --what-if`.
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
    """Draw throughput over the varied quantity, a line for each architecture.

    ``title`` says what stays as it is; the ending of ``path`` says which kind of picture.
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
