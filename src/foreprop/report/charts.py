"""Charts drawn by matplotlib: the systems' colours and marks, and pictures as files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure

INK, QUIET, GRID, CARD, WAIT = "#1b1d21", "#5c626b", "#dfe1e4", "#ffffff", "#c8102e"
"""report.css's colours in daylight; on the page they become its variables again."""
_PNG_DPI = 160
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
_OTHER = Style("#68717c", "#99a3af", "*")


PART_IN = (4.4, 3.2)

Draw = Callable[[Figure], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure: ``whole`` for the files, ``parts`` for the page, which puts them side by side."""

    whole: Draw
    whole_in: tuple[float, float]
    parts: Sequence[tuple[str, Draw]]
    """Each with what it shows, for who cannot see it."""
    part_in: tuple[float, float] = PART_IN
    systems: Sequence[str] = ()
    """What the page's legend lists."""


def style_of(system: str) -> Style:
    return STYLES.get(system, _OTHER)


def write_chart(folder: Path, name: str, chart: Chart, data: bytes) -> None:
    """``name``.png, ``name``.svg and ``name``.json."""
    with drawn(chart.whole, chart.whole_in) as figure:
        figure.savefig(folder / f"{name}.png", dpi=_PNG_DPI, facecolor=CARD)
        figure.savefig(folder / f"{name}.svg", facecolor=CARD, metadata={"Date": None})
    (folder / f"{name}.json").write_bytes(data)


def draw_picture(path: Path, chart: Chart) -> None:
    """One file, of the kind that its name ends in."""
    with drawn(chart.whole, chart.whole_in) as figure:
        kept = {"Date": None} if path.suffix == ".svg" else None  # the same bytes each time
        figure.savefig(path, dpi=_PNG_DPI, facecolor=CARD, metadata=kept)


@contextmanager
def drawn(draw: Draw, size_in: tuple[float, float]) -> Iterator[Figure]:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=size_in, layout="constrained")
        draw(figure)
        yield figure
