"""What a study's chart is: one drawing for the files, and its parts for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreprop.report.charts import CARD, PNG_DPI, STYLES, Draw, Style, drawn

_OTHER = Style("#68717c", "#99a3af", "*")
PART_IN = (4.4, 3.2)


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
        figure.savefig(folder / f"{name}.png", dpi=PNG_DPI, facecolor=CARD)
        figure.savefig(folder / f"{name}.svg", facecolor=CARD, metadata={"Date": None})
    (folder / f"{name}.json").write_bytes(data)
