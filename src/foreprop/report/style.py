"""How every chart looks: matplotlib's settings, and one colour, mark and dash for each system.

Colours were searched for so that also protan and deutan viewers tell them apart, on a light and on
a dark page; `tests/unit/test_style.py` computes it. Variants of a system have its colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure

INK, QUIET, GRID, CARD, WAIT = "#1b1d21", "#5c626b", "#dfe1e4", "#ffffff", "#c8102e"
"""report.css's colours in daylight; on the page they become its variables again."""
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


@dataclass(frozen=True, slots=True)
class Style:
    """How a system is drawn, in every chart: colour on a light and on a dark page, and mark."""

    light: str
    dark: str
    marker: str
    dashes: Literal["-", "--", ":", "-."] = "-"


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


Dashes = Literal["-", "--", ":", "-."]


def lighter(style: Style, share: float, marker: str, dashes: Dashes) -> Style:
    """A variant of the same hue, ``share`` of the way to white."""
    parts = (int(style.light[i : i + 2], 16) for i in (1, 3, 5))
    mixed = "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)
    return replace(style, light=f"#{mixed}", marker=marker, dashes=dashes)


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
"""Systems that are others with something changed: their colour, another mark and dash."""


def style_of(system: str) -> Style:
    """Of a system's name, as ``p3``, ``p3@200000`` or ``p2p p3``; the preset's, if it says one."""
    words = system.replace("@", " ").split()
    for name in (system.replace(" ", "-"), *reversed(words)):
        if name in STYLES or name in VARIANTS:
            return STYLES.get(name) or VARIANTS[name]
    return OTHER


def with_gaps(
    points: Iterable[tuple[float, float]], measured: Iterable[float]
) -> tuple[list[float], list[float]]:
    """A line's xs and ys, not joined where others were ``measured`` and this one was not."""
    known = dict(points)
    xs = sorted({*known, *measured})
    return xs, [known.get(x, math.nan) for x in xs]


Draw = Callable[[Figure], None]


@contextmanager
def drawn(draw: Draw, size_in: tuple[float, float]) -> Iterator[Figure]:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=size_in, layout="constrained")
        draw(figure)
        yield figure


def save(draw: Draw, size_in: tuple[float, float], *paths: Path) -> None:
    """As each name's ending says; the same bytes each time."""
    with drawn(draw, size_in) as figure:
        for path in paths:
            kept = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=PNG_DPI, facecolor=CARD, metadata=kept)
