"""What each test costs: seconds of a processor, with its children, and seconds of a clock.

    make test-costs              # all tiers; writes tests/costs.csv, and a page of the dearest

`pytest --costs FILE` appends one line of JSON to FILE for each case, and one for each of pytest's
own processes, which has what imports and collecting took. `python -m tests.costs FILE` makes the
record of it, with one row for all cases of a test in a tier; and the page
lab/docs/notebook/dearest-tests.md.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tiers import tier_of

RECORD = Path(__file__).with_name("costs.csv")
PAGE = Path(__file__).parents[1] / "lab" / "docs" / "notebook" / "dearest-tests.md"
OVERHEAD = "(imports and collecting)"
DEAREST = 40
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Of a test in one tier: all of its cases together."""

    tier: str
    test: str
    cases: int
    cpu_s: float
    wall_s: float


class Recorder:
    """Writes costs as tests end; pytest's workers share one file, a line a write."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.tests_s = 0.0
        file.parent.mkdir(parents=True, exist_ok=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        cpu_s, wall_s = processor_s(), time.perf_counter()
        result = yield
        cpu_s, wall_s = processor_s() - cpu_s, time.perf_counter() - wall_s
        self.tests_s += cpu_s
        self._write(Cost(tier_of(item), item.nodeid, 1, cpu_s, wall_s))
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        items = getattr(session, "items", [])
        tier = tier_of(items[0]) if items else "default"
        has_workers = session.config.getoption("dist", "no") != "no"  # each writes its own line
        cpu_s = time.process_time() if has_workers else processor_s() - self.tests_s
        self._write(Cost(tier, OVERHEAD, 1, cpu_s, 0.0))

    def _write(self, cost: Cost) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(cost) + "\n")


def processor_s() -> float:
    """What this process and its descendants have used, ended ones that were waited for included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(each.ru_utime + each.ru_stime for each in used)
    return own_s + sum(_used_by(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    """Of a process: what runs now. Linux tells it in /proc; elsewhere there are none."""
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in listing.read_text().split()]
        except OSError:  # it has ended meanwhile
            continue
        for child in children:
            yield child
            yield from _descendants(child)


def _used_by(pid: int) -> float:
    """Seconds of a process and of the ended children that it waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()  # what follows its name; then utime is the twelfth
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def read_costs(file: Path) -> list[Cost]:
    """Of each test in each tier, from what `pytest --costs` has left; the dearest come first."""
    found: dict[tuple[str, str], Cost] = {}
    for line in file.read_text().splitlines():
        case = Cost(*json.loads(line))
        key = case.tier, case.test.partition("[")[0]
        sums = zip(found.get(key, Cost(*key, 0, 0.0, 0.0))[2:], case[2:], strict=True)
        found[key] = Cost(*key, *map(sum, sums))
    return sorted(found.values(), key=lambda cost: -cost.cpu_s)


def write_record(costs: Iterable[Cost]) -> None:
    with RECORD.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Cost._fields)
        for cost in sorted(costs, key=lambda cost: cost[:2]):
            writer.writerow([*cost[:3], *(f"{seconds:.2f}" for seconds in cost[3:])])


def read_record() -> list[Cost]:
    """The one that is committed; nothing where there is none."""
    if not RECORD.exists():
        return []
    with RECORD.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Cost(row["tier"], row["test"], int(row["cases"]), float(row["cpu_s"]), float(row["wall_s"]))
        for row in rows
    ]


def page(costs: Sequence[Cost]) -> str:
    """``costs``: the dearest first."""
    lines = [
        "# The dearest tests",
        "",
        "`make test-costs` writes this page, and `tests/costs.csv` with all [tests](../tests.md).",
        "",
        "| tier | processor, minutes | imports and collecting |",
        "| --- | --- | --- |",
    ]
    for tier in dict.fromkeys(sorted(cost.tier for cost in costs)):
        of_tier = [cost for cost in costs if cost.tier == tier]
        overhead_s = sum(cost.cpu_s for cost in of_tier if cost.test == OVERHEAD)
        sum_s = sum(cost.cpu_s for cost in of_tier)
        lines.append(f"| {tier} | {sum_s / 60:.1f} | {overhead_s / 60:.1f} |")
    lines += [
        "",
        "| tier | test | cases | processor s | wall s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for cost in [cost for cost in costs if cost.test != OVERHEAD][:DEAREST]:
        test = cost.test.removeprefix("tests/").replace(".py::", ": ")
        seconds = f"{cost.cpu_s:.1f} | {cost.wall_s:.1f}"
        lines.append(f"| {cost.tier} | `{test}` | {cost.cases} | {seconds} |")
    return "\n".join(lines) + "\n"


def main(file: str) -> None:
    costs = read_costs(Path(file))
    write_record(costs)
    PAGE.write_text(page(costs))


if __name__ == "__main__":
    main(*sys.argv[1:])
