"""`scripts/versions.py`, and docs/versions.md: what is claimed of Pythons and torches was run."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "versions.py"))


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def rows(heading: str) -> list[list[str]]:
    """Of the page's table under a heading."""
    text = (ROOT / "docs" / "versions.md").read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# The page.
def test_classifiers_and_page_name_the_same_pythons() -> None:
    claimed = {
        entry.rpartition(" ")[2]
        for entry in project()["classifiers"]
        if entry.startswith("Programming Language :: Python :: 3.")
    }
    assert claimed == {row[0] for row in rows("Tested")}


def test_what_is_asked_for_is_the_oldest_that_was_tested() -> None:
    """Newer ones are let in, tested or not: the page says which."""
    (torch,) = [r for r in map(Requirement, project()["dependencies"]) if r.name == "torch"]
    tested = rows("Tested")
    oldest = min((row[1] for row in tested), key=numbers)
    assert str(torch.specifier) == f">={oldest.rpartition('.')[0]}"
    assert project()["requires-python"] == f">={min((row[0] for row in tested), key=numbers)}"


def test_the_readme_names_what_was_tested() -> None:
    words = (ROOT / "README.md").read_text()
    for python, torch, *_ in rows("Tested"):
        assert f"Python {python}" in words
        assert torch in words


def test_nothing_is_both_tested_and_not() -> None:
    tested = {(row[0], row[1]) for row in rows("Tested")}
    assert not tested & {(row[0], row[1]) for row in rows("Not tested")}
    known = {row[0] for row in [*rows("Tested"), *rows("Not tested")]}
    assert known == set(SCRIPT["PYTHONS"])


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


# The script.
def interpreter(path: Path) -> str:
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    return str(path)


def test_interpreters_are_those_on_path_and_pyenvs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    versions = tmp_path / "pyenv" / "versions"
    for name in ("3.12.1", "3.13.9", "3.13.10", "3.13.11t"):
        interpreter(versions / name / "bin" / "python")
    on_path = interpreter(tmp_path / "bin" / "python3.12")
    find = SCRIPT["find_interpreter"]
    assert find("3.12") == on_path
    assert find("3.13") == str(versions / "3.13.10" / "bin" / "python")
    assert find("3.13t") == str(versions / "3.13.11t" / "bin" / "python")
    for missing in ("3.14", "3.12t", str(tmp_path / "nowhere")):
        with pytest.raises(SCRIPT["Unavailable"], match=missing):
            find(missing)


def test_what_pip_could_not_find_is_the_reason() -> None:
    said = (
        "WARNING: a location is ignored\n"
        "ERROR: Could not find a version that satisfies the requirement torch==9 (from versions:)\n"
        "ERROR: No matching distribution found for torch==9\n"
    )
    assert SCRIPT["reason_of"](said) == "No matching distribution found for torch==9"
    assert SCRIPT["reason_of"]("Killed\n") == "Killed"


def test_an_interpreter_that_is_missing_is_left_out_and_nothing_run_is_no_success() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "versions.py"), "--python", "3.99"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert f"| 3.99 | {SCRIPT['pinned_torch']()} | not run: no python3.99 on PATH" in ran.stdout


def test_outcomes_are_told_apart() -> None:
    outcome = SCRIPT["Outcome"]
    said = SCRIPT["table"](
        [
            outcome("3.11.7", "2.13.0", "9 passed in 1.00s", passed=True),
            outcome("3.12.1", "2.13.0", "1 failed, 8 passed in 1.00s", passed=False),
            outcome("3.13", "2.13.0", "No matching distribution"),
        ]
    )
    assert [line.split("|")[3].split(":")[0].strip() for line in said.splitlines()[2:]] == [
        "passed",
        "FAILED",
        "not run",
    ]
