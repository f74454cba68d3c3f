"""`scripts/trainer_versions.py`, and docs/trainers.md: the releases that it names are those run."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
EXTRAS = {"lightning": "lightning", "transformers": "huggingface", "accelerate": "accelerate"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # where it runs
    return runpy.run_path(str(ROOT / "scripts" / "trainer_versions.py"))


def older(script: dict[str, Any]) -> dict[str, list[str]]:
    """Releases by package, in the script's order."""
    found: dict[str, list[str]] = {}
    for packages in script["OLDER"]:
        for package in packages:
            name, _, version = package.partition("==")
            found.setdefault(name, []).append(version)
    return found


def test_the_page_has_the_script_s_releases(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "trainers.md").read_text().partition("\n## Versions\n")[2]
    table = page.partition("\n\n    ")[0]  # the commands follow it
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    said = {cells[0].strip(): cells[2].strip().split(", ") for cells in rows}
    for name in EXTRAS:
        assert said[name] == older(script)[name]


def test_the_oldest_that_is_let_in_was_run(script: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, extra in EXTRAS.items():
        wanted = map(Requirement, project["optional-dependencies"][extra])
        (bound,) = [one.specifier for one in wanted if one.name == name]
        oldest = min(older(script)[name], key=lambda v: [int(part) for part in v.split(".")])
        assert str(bound) == f">={oldest.rpartition('.')[0]}"


def test_each_framework_has_its_tests(script: dict[str, Any]) -> None:
    for packages in script["OLDER"]:
        for path in script["tests_of"](packages):
            assert (ROOT / path).is_file()
            assert packages[0].startswith("lightning") is ("lightning" in path)
