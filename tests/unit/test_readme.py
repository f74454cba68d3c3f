"""The README's tables are those of the code, and its links lead somewhere."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from foreprop.cli.config import value_text
from foreprop.cli.main import app
from foreprop.config import PRESETS, Config
from foreprop.path.partoptimizer import ELEMENTWISE_OPTIMIZERS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\|(.*)\|$", section, flags=re.MULTILINE)[2:]
    return [[cell.strip() for cell in row.split("|")] for row in table]


def test_the_settings_are_listed_with_their_defaults() -> None:
    assert rows("Settings") == [
        [f"`{spec.name}`", value_text(spec.name, spec.default), spec.metadata["help"]]
        for spec in fields(Config)
    ]


def test_the_presets_are_listed_with_their_knobs() -> None:
    assert [row[:5] for row in rows("Presets")] == [
        [f"`{name}`", *(knobs[knob] for knob in ("granularity", "order", "reply", "placement"))]
        for name, knobs in PRESETS.items()
    ]


def test_the_optimizers_are_listed() -> None:
    (row,) = [row for row in rows("What is an error, and what to do instead") if "LBFGS" in row[0]]
    assert sorted(row[2].split(", ")) == sorted(ELEMENTWISE_OPTIMIZERS)


def test_the_commands_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"`foreprop ([a-z]+)", README))
    assert named <= set(commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
