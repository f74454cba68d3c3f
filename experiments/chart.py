"""What a study's chart is: one drawing for the files, and its parts for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreprop.report.style import Draw, save

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


def write_chart(folder: Path, name: str, chart: Chart, data: bytes) -> None:
    """``name``.png, ``name``.svg and ``name``.json."""
    save(chart.whole, chart.whole_in, folder / f"{name}.png", folder / f"{name}.svg")
    (folder / f"{name}.json").write_bytes(data)
