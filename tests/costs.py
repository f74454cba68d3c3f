"""What each test costs: seconds of a processor, with its children, and seconds of a clock.

`pytest --costs FILE` appends one line of JSON to FILE for each test, and one for each of pytest's
own processes, which has what imports and collecting took. `scripts/test_costs.py` makes
the table of it that docs/tests.md names.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
        self._write(test=item.nodeid, cpu_s=cpu_s, wall_s=wall_s)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        has_workers = (
            session.config.getoption("dist", "no") != "no"
        )  # they write lines of their own
        cpu_s = time.process_time() if has_workers else processor_s() - self.tests_s
        self._write(test=None, cpu_s=cpu_s, wall_s=0.0)

    def _write(self, *, test: str | None, cpu_s: float, wall_s: float) -> None:
        line = {"test": test, "cpu_s": round(cpu_s, 4), "wall_s": round(wall_s, 4)}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


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
