"""All variants of a program, one after another, and what came of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import statistics
import sys
from pathlib import Path

from tests.programs import source
from tests.programs.compare import (
    CLOSE,
    DIFFERENT,
    EQUAL,
    NOT_RUN,
    REFUSED,
    Comparison,
    loss_difference,
    relative_difference,
    verdict,
)
from tests.programs.launch import Outcome, run
from tests.programs.program import DDP, FOREPROP, REBUCKETED, Program

GOOD = (EQUAL, CLOSE)
RESULTS = "results.json"


class Examination:
    """Runs in ``folder``; those that came out well are removed again."""

    def __init__(self, folder: Path, repeats: int = 1) -> None:
        self.folder = folder
        self.repeats = repeats
        self.comparisons: list[Comparison] = []
        self.skipped: dict[str, str] = {}

    @property
    def failed(self) -> list[Comparison]:
        return [c for c in self.comparisons if c.verdict in (REFUSED, DIFFERENT)]

    def run(self, program: Program, world: int) -> None:
        """Compare the program's variants with ``world`` ranks, or say why that cannot be."""
        if program.name in self.skipped:
            return
        if missing := _missing(program):
            packages = " ".join(missing)
            self._skip(
                program, f"it imports {packages}: see lab/docs/programs.md for how to get that"
            )
            return
        try:
            found = self._compare(program, world)
        except source.NotHere as error:
            self._skip(program, str(error))
            return
        self.comparisons.append(found)
        self.save()
        print(_line(found), flush=True)
        if found.verdict in GOOD:
            shutil.rmtree(self._place(program, world, ""), ignore_errors=True)

    def _skip(self, program: Program, why: str) -> None:
        self.skipped[program.name] = why
        print(f"{program.name}: skipped; {why}", flush=True)

    def _place(self, program: Program, world: int, variant: str) -> Path:
        name = "".join(letter if letter.isalnum() else "-" for letter in program.name)
        return self.folder / f"{name}-{world}" / variant

    def _compare(self, program: Program, world: int) -> Comparison:
        outcomes: dict[str, list[Outcome]] = {DDP: [], FOREPROP: []}
        for _ in range(self.repeats):
            for variant, found in outcomes.items():
                found.append(run(program, variant, world, self._place(program, world, variant)))
        wanted, ours = outcomes[DDP][0], outcomes[FOREPROP][0]
        exact = world == 2 and not program.rounding
        yardstick = None if world == 2 else self._yardstick(program, world, wanted)
        word, note = verdict(ours, wanted, program.tolerance, exact=exact, yardstick=yardstick)
        comparison = Comparison(
            program=program.name, world=world, lines=program.lines_changed, verdict=word, note=note
        )
        if word in (REFUSED, NOT_RUN):
            return comparison
        return dataclasses.replace(
            comparison,
            difference=relative_difference(ours, wanted),
            yardstick=yardstick,
            loss_difference=loss_difference(ours, wanted),
            step_s=_median(outcomes[FOREPROP]),
            ddp_step_s=_median(outcomes[DDP]),
        )

    def _yardstick(self, program: Program, world: int, wanted: Outcome) -> float | None:
        if wanted.error:
            return None
        other = run(program, REBUCKETED, world, self._place(program, world, REBUCKETED))
        return None if other.error else relative_difference(other, wanted)

    def save(self) -> None:
        """Into results.json, beside what earlier runs of other programs have left there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = {(c.program, c.world): c for c in [*self.earlier(), *self.comparisons]}
        records = [dataclasses.asdict(comparison) for comparison in found.values()]
        (self.folder / RESULTS).write_text(json.dumps(records, indent=1))

    def earlier(self) -> list[Comparison]:
        path = self.folder / RESULTS
        return (
            [Comparison(**record) for record in json.loads(path.read_text())]
            if path.exists()
            else []
        )


def _median(outcomes: list[Outcome]) -> float:
    return statistics.median(outcome.median_step_s for outcome in outcomes)


def _missing(program: Program) -> list[str]:
    site = str(source.folder() / "site")
    if site not in sys.path:
        sys.path.append(site)
    return [name for name in program.packages if importlib.util.find_spec(name) is None]


def _line(found: Comparison) -> str:
    words = [f"{found.program}, {found.world} ranks: {found.verdict}"]
    if found.difference is not None:
        words.append(f"difference {found.difference:.1e}, losses {found.loss_difference:.1e}")
    if found.yardstick is not None:
        words.append(f"DDP to itself {found.yardstick:.1e}")
    if found.step_s is not None and found.ddp_step_s is not None:
        words.append(f"step {1e3 * found.step_s:.1f} ms, DDP's {1e3 * found.ddp_step_s:.1f} ms")
    return "; ".join([*words, *([found.note] if found.note else [])])
