"""The tests' own order: what is shared, and what may run together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tiers import long_cases

TESTS = Path(__file__).parents[1]


def imported(path: Path) -> Iterator[str]:
    """The last parts of the modules that a file imports, and of the names from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (name.rpartition(".")[2] for name in names)


def test_no_test_file_is_imported() -> None:
    files = sorted(TESTS.rglob("*.py"))
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    assert len(tests) > 100
    found = {path.name: tests.intersection(imported(path)) for path in files}
    assert {name: names for name, names in found.items() if names} == {}


def test_long_cases_are_marked() -> None:
    ((value,), marks, _) = long_cases(3)[0]
    assert (value, [mark.name for mark in marks]) == (3, ["long"])


def test_make_runs_every_test_that_is_to_run_alone() -> None:
    (folders,) = re.findall(r"^ALONE := (.*)$", (TESTS.parent / "Makefile").read_text(), re.M)
    files = set(TESTS.rglob("test_*.py")) - {Path(__file__)}
    found = {path.parent.name for path in files if "mark.alone" in path.read_text()}
    assert found == {Path(folder).name for folder in folders.split()} | {"lagging"}
