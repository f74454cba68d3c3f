"""What an installation brings: what training needs, and what each extra adds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from foreprop.errors import how_to_install
from foreprop.version import __version__

ROOT = Path(__file__).parents[3]
PROJECT: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TOLD = re.compile(r"how_to_install\(\"?'?(\w+)|pip install (?:-e )?'\.\[(\w+)\]'")


def packages(extra: str) -> set[str]:
    """With those of the extras that it includes."""
    found = set()
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == "foreprop":
            found |= {name for each in requirement.extras for name in packages(each)}
        else:
            found.add(requirement.name)
    return found


def test_who_only_trains_installs_nothing_of_reports_and_the_lab() -> None:
    base = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert base == {"torch", "numpy", "msgspec", "rich", "typer", "psutil", "zstandard", "awscrt"}
    assert packages("report") == {"jinja2"}
    assert packages("plots") == {"matplotlib"}


def test_make_installs_what_its_targets_need() -> None:
    """`make demo` and `make test` of a fresh clone."""
    assert packages("report") | packages("plots") < packages("dev")
    assert "-e '.[dev]' -e ./lab" in (ROOT / "Makefile").read_text()


def test_the_lab_is_of_foreprop_s_version() -> None:
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert lab["version"] == __version__
    assert f"foreprop[plots,report]=={__version__}" in lab["dependencies"]


def test_only_extras_that_there_are_are_told_of_and_of_no_index() -> None:
    told, of_an_index = set(), []
    for pattern in ("src/**/*.py", "lab/**/*.py", "docs/**/*.md", "lab/**/*.md", "*.md"):
        for path in ROOT.glob(pattern):
            text = path.read_text()
            told |= {one or other for one, other in TOLD.findall(text)}
            if re.search(r"install [^\n]*foreprop\[", text):
                of_an_index.append(path.relative_to(ROOT).as_posix())
    assert of_an_index == []
    assert {"lightning", "tls", "report"} <= told
    assert told - {"EXTRA", "extra", "_EXTRAS"} <= set(EXTRAS)


def test_the_line_says_where_to_type_it() -> None:
    assert how_to_install("tls") == "pip install '.[tls]' in a clone of foreprop"
