"""The tables of the page of ``foreprop lab figures``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreprop.tools.report.document import ABSENT, TIMES, milliseconds, percent
from foreprop_lab.experiments.figures.comparison import (
    PAPER,
    SUBJECT,
    Point,
    in_order,
    maybe_best,
    model_name,
)
from foreprop_lab.experiments.figures.curves import Measured, unscaled_rate
from foreprop_lab.setting.records import Record

CPU_BOUND = "CPU-bound"


class Cell(NamedTuple):
    """A table's cell: words, perhaps followed by small ones."""

    words: str
    small: str = ""
    kind: str = ""


class Row(NamedTuple):
    name: str
    cells: Sequence[Cell]
    first: bool = False
    """Whether this is the first row of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as the page's template needs it."""

    title: str = ""
    names: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    kind: str = ""


_ABSENT = Cell(ABSENT)


def best_table(points: Sequence[Point]) -> Table | None:
    """The best speed-ups in the bandwidth sweep, beside the paper's."""
    if not points:
        return None
    others = [name for name in _systems(points) if name != SUBJECT]
    others.sort(key=lambda name: name != "kvstore")  # beside what the paper compares with
    names = ["model", *(f"over {name}" for name in others)]
    names.insert(min(2, len(names)), "the paper, over KVStore")
    rows = []
    for model in dict.fromkeys(point.model for point in points):
        cells = [_best(points, model, other) for other in others]
        cells.insert(min(1, len(cells)), _paper(model))
        rows.append(Row(model_name(model), cells))
    return Table(
        title="Best speed-up of p3 along the bandwidth sweep",
        names=names,
        rows=rows,
        caption="How many times as long the other system's steps take, medians, at the balance "
        "where that is most. kvstore is foreprop's own model of MXNet's KVStore, which the paper "
        "compares with (section 5.3, four machines with one GPU each); ddp-tuned is DDP with "
        "the best of several bucket sizes, found in the same run.",
    )


def _best(points: Sequence[Point], model: str, other: str) -> Cell:
    best = maybe_best(points, model, other)
    if best is None:
        return _ABSENT
    return Cell(f"{best.speed_up:.2f}{TIMES}", f"at balance {best.balance:.3g}")


def _paper(model: str) -> Cell:
    reported = PAPER.get(model)
    if reported is None:
        return _ABSENT
    return Cell(f"{reported.speed_up:.2f}{TIMES}", reported.where)


def points_table(points: Sequence[Point], place: str, title: str) -> Table:
    """All systems in every setting; ``place`` is what the sweep is over: balance or nodes."""
    systems = _systems(points)
    others = [name for name in systems if name != SUBJECT]
    names = ["model", place, "link", "limit", "p3, median", "p10 to p90"]
    names += [f"{name} / limit" for name in systems]
    names += [f"p3 over {name}" for name in others]
    rows, model = [], ""
    for point in points:
        cells = [Cell(f"{point.balance:.3g}" if place == "balance" else str(point.nodes))]
        cells += [Cell(unscaled_rate(point.rate_bits_per_s)), Cell(milliseconds(point.limit_s))]
        cells += _step_cells(point.by_system.get(SUBJECT))
        cells += [_efficiency_cell(point.by_system.get(name)) for name in systems]
        cells += [_speed_up_cell(point, other) for other in others]
        rows.append(Row(model_name(point.model), cells, first=point.model != model))
        model = point.model
    return Table(
        title=title,
        names=names,
        rows=rows,
        caption='The columns "/ limit" are efficiencies: the limit over the median step; 1.00 '
        "cannot be beaten.",
    )


def _step_cells(record: Record | None) -> list[Cell]:
    if record is None:
        return [_ABSENT] * 2
    spread = record.iteration_s
    lowest = milliseconds(spread.p10).removesuffix("ms").rstrip()
    between = f"{lowest} {ABSENT} {milliseconds(spread.p90)}"
    return [Cell(milliseconds(spread.median)), Cell(between)]


def _efficiency_cell(record: Record | None) -> Cell:
    if record is None:
        return _ABSENT
    if record.cpu_bound:
        return Cell(f"{record.efficiency:.2f}", CPU_BOUND, kind="bound")
    return Cell(f"{record.efficiency:.2f}")


def _speed_up_cell(point: Point, other: str) -> Cell:
    speed_up = point.maybe_speed_up(other)
    return _ABSENT if speed_up is None else Cell(f"{speed_up:.2f}{TIMES}")


def slice_table(runs: Sequence[Measured], title: str) -> Table:
    """P3's efficiency by slice size, and how busy the machine was."""
    models = list(dict.fromkeys(setting.profile.name for setting, _ in runs))
    found = {
        (setting.unscaled_slice_elems, setting.profile.name): record
        for setting, records in runs
        for record in records
        if record.system == SUBJECT
    }
    names = ["elements"]
    for model in models:
        names += [model_name(model), "CPUs busy"]
    rows = []
    for size in sorted({setting.unscaled_slice_elems for setting, _ in runs}):
        cells = []
        for model in models:
            record = found.get((size, model))
            busy = ABSENT if record is None else percent(record.cpu_share)
            cells += [_efficiency_cell(record), Cell(busy)]
        rows.append(Row(f"{size:,}", cells))
    return Table(title=title, names=names, rows=rows)


def _systems(points: Iterable[Point]) -> list[str]:
    return in_order(name for point in points for name in point.by_system)
