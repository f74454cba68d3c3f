"""A study's chart: one drawing for the files, and its parts for a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foreprop.tools.report.charts import Dashes, Draw, Style, save

PART_IN = (4.4, 3.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure: ``whole`` for the files, ``parts`` for the page, which puts them side by side."""

    whole: Draw
    whole_in: tuple[float, float]
    parts: Sequence[tuple[str, Draw]]
    """The parts, each with a text that says what it shows for people who cannot see it."""
    part_in: tuple[float, float] = PART_IN
    systems: Sequence[str] = ()
    """The systems that the page's legend lists."""


def write_chart(folder: Path, name: str, chart: Chart, data: bytes) -> None:
    """Write the chart as ``name``.png and ``name``.svg, and its data as ``name``.json."""
    save(chart.whole, chart.whole_in, folder / f"{name}.png", folder / f"{name}.svg")
    (folder / f"{name}.json").write_bytes(data)


def lighter(style: Style, share: float, marker: str, dashes: Dashes) -> Style:
    """A variant of the same hue, ``share`` of the way to white."""
    parts = (int(style.light[i : i + 2], 16) for i in (1, 3, 5))
    mixed = "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)
    return replace(style, light=f"#{mixed}", marker=marker, dashes=dashes)


def with_gaps(
    points: Iterable[tuple[float, float]], measured: Iterable[float]
) -> tuple[list[float], list[float]]:
    """A line's xs and ys, not joined where others were ``measured`` and this one was not."""
    known = dict(points)
    xs = sorted({*known, *measured})
    return xs, [known.get(x, math.nan) for x in xs]
