"""Write docs/combinations.md from `foreprop.config.combinations`: run this after changing a row.

python scripts/combinations_page.py

A test compares the page with `page()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from foreprop.config.combinations import FEATURES, REFUSED, Refused

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"

HEAD = """\
# What does not go together

<!-- Made by scripts/combinations_page.py from foreprop.config.combinations: edit that. -->

All settings go together, but for these pairs. `parallelize` refuses each before anything is sent,
and says why.

`architecture="auto"` chooses among what the other settings allow. With one that only servers have
it means `p2p`, or `ps`. `slice_elems="auto"` means the usual size where slices cannot change while
a session runs, or where there are none.
"""
BY_NATURE = """\
## By their nature

One of the two has no meaning beside the other.
"""
NOT_YET = """\
## Not yet

These could go together, and nobody has built it.
"""


def page() -> str:
    """The page's whole text."""
    by_nature = table(row for row in REFUSED if row.by_nature)
    not_yet = table(row for row in REFUSED if not row.by_nature)
    return "\n".join([HEAD, BY_NATURE, by_nature, NOT_YET, not_yet])


def table(rows: Iterable[Refused]) -> str:
    lines = ["| this | beside | instead |", "| --- | --- | --- |"]
    for row in rows:
        groups = (", ".join(FEATURES[name].documented() for name in g) for g in row[:2])
        lines.append(f"| {' | '.join((*groups, row.instead))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
