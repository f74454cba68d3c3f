"""The tables of the page of ``foreprop lab figures``, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreprop.lab.comparison import PAPER, SUBJECT, Point, in_order, maybe_best, model_name
from foreprop.lab.curves import Measured
from foreprop.report.markup import ABSENT, TIMES, milliseconds, percent, rate, tag, text
from foreprop.workload.records import Record

CPU_BOUND = "CPU-bound"


def best_section(points: Sequence[Point]) -> str:
    """The best speed-ups along the bandwidth sweep, beside the paper's."""
    if not points:
        return ""
    others = [name for name in _systems(points) if name != SUBJECT]
    others.sort(key=lambda name: name != "kvstore")  # beside what the paper compares with
    names = ["model", *(f"over {name}" for name in others)]
    names.insert(min(2, len(names)), "the paper, over KVStore")
    rows = []
    for model in dict.fromkeys(point.model for point in points):
        cells = [_best(points, model, other) for other in others]
        cells.insert(min(1, len(cells)), _paper(model))
        rows.append(row(model_name(model), cells))
    return tag(
        "section",
        tag("h2", "Best speed-up of p3 along the bandwidth sweep")
        + table(names, rows)
        + tag(
            "p",
            "How many times as long the other system's steps take, medians, at the balance where "
            "that is most. kvstore is foreprop's own model of MXNet's KVStore, which the paper "
            "compares with (section 5.3, four machines with one GPU each); ddp-tuned is DDP with "
            "the best of several bucket sizes, found in the same run.",
            class_="caption",
        ),
    )


def _best(points: Sequence[Point], model: str, other: str) -> str:
    best = maybe_best(points, model, other)
    if best is None:
        return tag("td", ABSENT)
    where = tag("small", f" at balance {best.balance:.3g}")
    return tag("td", f"{best.speed_up:.2f}{TIMES}{where}")


def _paper(model: str) -> str:
    reported = PAPER.get(model)
    if reported is None:
        return tag("td", ABSENT)
    where = tag("small", text(f" {reported.where}"))
    return tag("td", f"{reported.speed_up:.2f}{TIMES}{where}")


def points_table(points: Sequence[Point], place: str) -> str:
    """All systems in every setting; ``place`` is what the sweep is over: balance or nodes."""
    systems = _systems(points)
    others = [name for name in systems if name != SUBJECT]
    names = ["model", place, "link", "limit", "p3, median", "p10 to p90"]
    names += [f"{name} / limit" for name in systems]
    names += [f"p3 over {name}" for name in others]
    rows, model = [], ""
    for point in points:
        cells = [tag("td", f"{point.balance:.3g}" if place == "balance" else str(point.nodes))]
        cells += [tag("td", rate(point.rate_bits_per_s)), tag("td", milliseconds(point.limit_s))]
        cells += _step_cells(point.by_system.get(SUBJECT))
        cells += [_efficiency_cell(point.by_system.get(name)) for name in systems]
        cells += [_speed_up_cell(point, other) for other in others]
        rows.append(row(model_name(point.model), cells, first=point.model != model))
        model = point.model
    return table(names, rows) + tag(
        "p",
        'The columns "/ limit" are efficiencies: the limit over the median step; 1.00 cannot be '
        "beaten.",
        class_="caption",
    )


def _step_cells(record: Record | None) -> list[str]:
    if record is None:
        return [tag("td", ABSENT)] * 2
    spread = record.iteration_s
    lowest = milliseconds(spread.p10).removesuffix("ms").rstrip()
    between = f"{lowest} {ABSENT} {milliseconds(spread.p90)}"
    return [tag("td", milliseconds(spread.median)), tag("td", between)]


def _efficiency_cell(record: Record | None) -> str:
    if record is None:
        return tag("td", ABSENT)
    if record.cpu_bound:
        return tag("td", f"{record.efficiency:.2f} " + tag("small", CPU_BOUND), class_="bound")
    return tag("td", f"{record.efficiency:.2f}")


def _speed_up_cell(point: Point, other: str) -> str:
    speed_up = point.maybe_speed_up(other)
    return tag("td", ABSENT if speed_up is None else f"{speed_up:.2f}{TIMES}")


def slice_table(runs: Sequence[Measured]) -> str:
    """Of p3, by slice size: efficiency, and how busy the machine was."""
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
            cells += [_efficiency_cell(record), tag("td", busy)]
        rows.append(row(f"{size:,}", cells))
    return table(names, rows)


def table(names: Sequence[str], rows: Iterable[str], *, kind: str = "") -> str:
    head = tag("tr", "".join(tag("th", text(name), scope="col") for name in names))
    table = tag("table", tag("thead", head) + tag("tbody", "".join(rows)), class_=kind)
    return tag("div", table, class_="scroll", tabindex=0)


def row(name: str, cells: Iterable[str], *, first: bool = False) -> str:
    content = tag("th", text(name), scope="row") + "".join(cells)
    return tag("tr", content, class_="group") if first else tag("tr", content)


def _systems(points: Iterable[Point]) -> list[str]:
    return in_order(name for point in points for name in point.by_system)
