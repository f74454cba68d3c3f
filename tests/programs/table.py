"""The page with the table, lab/docs/programs.md: what is between two marks in it is made here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.programs import catalogue
from tests.programs.compare import Comparison

RESULTS, ORIGINS = "table", "origins"


def write(page: Path, comparisons: Sequence[Comparison], worlds: Sequence[int]) -> None:
    """Replace what is between the marks."""
    text = replaced(page.read_text(), RESULTS, rows(comparisons, worlds))
    page.write_text(replaced(text, ORIGINS, origins()))


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    made = "\n".join(lines)
    return f"{before}{begin}\n{made}\n{end}{after}"


def origins() -> list[str]:
    lines = ["| program | repository | commit | file | licence |", "|---|---|---|---|---|"]
    return lines + [
        f"| {p.name} | {p.repository} | {p.commit[:12]} | {p.path} | {p.licence} |"
        for p in catalogue.PROGRAMS
    ]


def rows(comparisons: Sequence[Comparison], worlds: Sequence[int]) -> list[str]:
    found = {(c.program, c.world): c for c in comparisons}
    head = ["program", "in it", "lines", *(f"{n} ranks | step time" for n in worlds)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * (3 + 2 * len(worlds))}"]
    for program in catalogue.PROGRAMS:
        cells = [_cells(found.get((program.name, world))) for world in worlds]
        if any((program.name, world) in found for world in worlds):
            lines.append(
                f"| {program.name} | {program.about} | {program.lines_changed} |"
                f" {' | '.join(cells)} |"
            )
    return lines


def _cells(comparison: Comparison | None) -> str:
    if comparison is None:
        return "| "
    said = comparison.verdict
    if comparison.difference:
        said += f" ({comparison.difference:.0e}"
        said += f"; DDP {comparison.yardstick:.0e})" if comparison.yardstick is not None else ")"
    if comparison.note:
        said += f": {comparison.note[:160].replace('|', '/').splitlines()[0]}"
    if comparison.step_s is None or comparison.ddp_step_s is None:
        return f"{said} | "
    ratio = comparison.step_s / comparison.ddp_step_s
    return f"{said} | {1e3 * comparison.step_s:.1f} ms, {ratio:.2f} of DDP"
