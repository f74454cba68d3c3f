"""docs/plan.md shows what `foreprop plan` prints: each of its outputs, word for word."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreprop.tools.cli.app import app

PAGE = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
FIRST = re.search(r"^```\n\$ (foreprop plan .*)\n((?:.*\n)+?)```$", PAGE, re.MULTILINE)
SHOWN = re.findall(r"`(--[^`]+)`:\n\n```\n((?:.*\n)+?)```$", PAGE, re.MULTILINE)
"""Options that are added to the first command, and what it prints then, whole or in part."""


def words(text: str) -> str:
    return " ".join(text.split())


def printed(options: str) -> str:
    assert FIRST
    given = [*shlex.split(FIRST[1])[1:], *shlex.split(options)]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return words(result.output)


def test_the_first_output_is_what_is_printed() -> None:
    assert FIRST
    assert printed("") == words(FIRST[2])


@pytest.mark.long
@pytest.mark.parametrize(("options", "output"), SHOWN)
def test_what_is_shown_of_other_options_is_what_is_printed(options: str, output: str) -> None:
    assert words(output).removesuffix("...") in printed(options)


def test_two_more_are_shown() -> None:
    assert len(SHOWN) == 2
