"""What commands print: tables that fit the terminal, and are never wrapped where there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNLIMITED = 10_000
"""Characters per line where the output goes to no terminal."""
_CUT = "\N{HORIZONTAL ELLIPSIS}"
"""What rich leaves of a cell that does not fit."""


def console(*, to_errors: bool = False) -> Console:
    stream = sys.stderr if to_errors else sys.stdout
    return Console(width=None if stream.isatty() else _UNLIMITED, stderr=to_errors)


def print_line(to: Console, text: str, style: str | None = None) -> None:
    """Print a line as it is: not wrapped, nothing coloured inside of it."""
    to.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def print_table(to: Console, table: Table) -> None:
    """Print a table, or where its columns would be cut, each row as lines of heading and value."""
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    if title:
        print_line(to, str(title), "bold")
    drawn = "".join(segment.text for segment in to.render(table))
    if _CUT in drawn or any(cell_len(line.rstrip()) > to.width for line in drawn.splitlines()):
        headings = [_plain(column.header).replace("\n", " ") for column in table.columns]
        rows = zip(*(map(_plain, column.cells) for column in table.columns), strict=True)
        for first, *others in rows:
            print_line(to, first, "bold")
            for heading, cell in zip(headings[1:], others, strict=True):
                if cell:
                    print_line(to, f"  {heading}: {cell}")
    else:
        to.print(table)
    if caption:
        print_line(to, str(caption))


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def print_json(value: msgspec.Struct | dict[str, Any] | Sequence[Any]) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())
