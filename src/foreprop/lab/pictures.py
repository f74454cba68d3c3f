"""Charts as PNG and SVG files, and as SVG elements in the page's own colours."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from foreprop.lab.charts import CARD, GRID, INK, QUIET, STYLES, WAIT, Chart, Draw, style_of
from foreprop.report.markup import tag

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


def write_chart(folder: Path, name: str, chart: Chart, data: bytes) -> None:
    """``name``.png, ``name``.svg and ``name``.json."""
    with _drawn(chart.whole, chart.whole_in) as figure:
        figure.savefig(folder / f"{name}.png", dpi=_PNG_DPI, facecolor=CARD)
        figure.savefig(folder / f"{name}.svg", facecolor=CARD, metadata={"Date": None})
    (folder / f"{name}.json").write_bytes(data)


def draw_picture(path: Path, chart: Chart) -> None:
    """One file, of the kind that its name ends in."""
    with _drawn(chart.whole, chart.whole_in) as figure:
        kept = {"Date": None} if path.suffix == ".svg" else None  # the same bytes each time
        figure.savefig(path, dpi=_PNG_DPI, facecolor=CARD, metadata=kept)


def inline_parts(name: str, chart: Chart) -> list[str]:
    """The parts as SVG elements for the page; ``name`` keeps their ids apart from others'."""
    return [
        _inline(f"{name}-{number}", label, draw, chart.part_in)
        for number, (label, draw) in enumerate(chart.parts)
    ]


@contextmanager
def _drawn(draw: Draw, size_in: tuple[float, float]) -> Iterator[Figure]:
    with mpl.rc_context(_RC):
        figure = Figure(figsize=size_in, layout="constrained")
        draw(figure)
        yield figure


def _inline(name: str, label: str, draw: Draw, size_in: tuple[float, float]) -> str:
    written = io.StringIO()
    with _drawn(draw, size_in) as figure:
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    drawing = written.getvalue()
    inside = drawing[drawing.index(">", drawing.index("<svg")) + 1 : drawing.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r'\bid="', f'id="{name}-', inside)
    inside = re.sub(r'(url\(|href=")#', rf"\1#{name}-", inside)
    width, height = (72 * inches for inches in size_in)
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", _with_variables(inside), viewBox=box, role="img", aria_label=label)


def _with_variables(svg: str) -> str:
    """The page's variables for our colours, and its font for ours."""
    for colour, name in _variables().items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.replace("'DejaVu Sans'", "system-ui, sans-serif")


def _variables() -> dict[str, str]:
    systems = {style_of(name).light: variable(name) for name in (*STYLES, "other")}
    page = {INK: "ink", QUIET: "quiet", GRID: "grid", CARD: "card", WAIT: "wait"}
    return page | systems


def variable(system: str) -> str:
    """The CSS variable that holds the system's colour."""
    return f"system-{system if system in STYLES else 'other'}"


def systems_css() -> str:
    """The systems' colours for a light and for a dark page."""
    styles = {variable(name): style_of(name) for name in (*STYLES, "other")}
    light = "".join(f"--{name}:{style.light};" for name, style in styles.items())
    dark = "".join(f"--{name}:{style.dark};" for name, style in styles.items())
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
