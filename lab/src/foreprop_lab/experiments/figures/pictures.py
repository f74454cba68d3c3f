"""Charts as PNG and SVG files, and as SVG elements in the page's own colours."""

from __future__ import annotations

import io
import re
from typing import NamedTuple

from markupsafe import Markup

from foreprop.tools.report.charts import (
    CARD,
    GRID,
    INK,
    OTHER,
    QUIET,
    STYLES,
    WAIT,
    Draw,
    drawn,
    style_of,
)
from foreprop_lab.experiments.chart import Chart

_SYSTEMS = {**STYLES, "other": OTHER}


class Part(NamedTuple):
    """An SVG element of the page."""

    label: str
    """What it shows, for people who cannot see it."""
    box: str
    inside: Markup


def inline_parts(name: str, chart: Chart) -> list[Part]:
    """The parts as SVG elements for the page; ``name`` makes their ids differ from others'."""
    return [
        _inline(f"{name}-{number}", label, draw, chart.part_in)
        for number, (label, draw) in enumerate(chart.parts)
    ]


def _inline(name: str, label: str, draw: Draw, size_in: tuple[float, float]) -> Part:
    written = io.StringIO()
    with drawn(draw, size_in) as figure:
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    drawing = written.getvalue()
    inside = drawing[drawing.index(">", drawing.index("<svg")) + 1 : drawing.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r'\bid="', f'id="{name}-', inside)
    inside = re.sub(r'(url\(|href=")#', rf"\1#{name}-", inside)
    width, height = (72 * inches for inches in size_in)
    box = f"0 0 {width:.0f} {height:.0f}"
    return Part(label, box, Markup(_with_variables(inside)))


def _with_variables(svg: str) -> str:
    """The SVG with the page's colour variables and font in place of ours."""
    for colour, name in _variables().items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.replace("'DejaVu Sans'", "system-ui, sans-serif")


def _variables() -> dict[str, str]:
    systems = {style.light: variable(name) for name, style in _SYSTEMS.items()}
    page = {INK: "ink", QUIET: "quiet", GRID: "grid", CARD: "card", WAIT: "wait"}
    return page | systems


def variable(system: str) -> str:
    """The CSS variable that holds the system's colour, which its variants share."""
    colour = style_of(system).light
    return f"system-{next(name for name, style in _SYSTEMS.items() if style.light == colour)}"


def systems_css() -> str:
    """The systems' colours for a light and for a dark page."""
    styles = {variable(name): style for name, style in _SYSTEMS.items()}
    light = "".join(f"--{name}:{style.light};" for name, style in styles.items())
    dark = "".join(f"--{name}:{style.dark};" for name, style in styles.items())
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
