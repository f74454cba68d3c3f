"""The threat model names a test for what docs/security.md promises: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "lab" / "docs" / "threats.md"
CAN = "**can**"


def rows() -> list[list[str]]:
    page = PAGE.read_text()
    table = page[page.index("| who | does |") :].split("\n\n")[0]
    found = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [[cell.strip(" |") for cell in row] for row in found]


def test_every_named_test_exists() -> None:
    page = PAGE.read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 15
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_every_line_names_a_test_unless_it_says_that_it_can_be_done() -> None:
    for who, does, with_secret, *rest in rows():
        has_test = any("`test_" in cell for cell in rest)
        assert has_test or CAN in with_secret, (who, does)
