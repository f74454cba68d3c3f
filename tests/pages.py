"""Users' pages, and the commands on them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
MADE = {"commands.md", "settings.md", "combinations.md", "api.md"}
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in MADE),
    *(ROOT / "lab" / "docs" / f"{name}.md" for name in ("codecs", "compiled", "measurements")),
    *(ROOT / "lab" / "docs" / f"{name}.md" for name in ("relays", "tests")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^    (?:\$ )?((?:[A-Z_]+=\S+ )*(?:foreprop|torchrun|python3?|pytest) (?:.*\\\n)*.*)$",
    re.MULTILINE,
)
SAID = re.compile(r"foreprop(?: run)?:? ?.*: |foreprop: ")


def commands(page: Path) -> list[list[str]]:
    """Its indented lines that a shell would run, as words; what commands print is left out."""
    text = FENCED.sub("", page.read_text())
    lines = [found.replace("\\\n", " ") for found in COMMAND.findall(text)]
    lines = [line.replace("/shared/", "") for line in lines if not SAID.match(line)]
    return [shlex.split(line, comments=True) for line in lines]
