"""docs/commands.md, made from the command line itself: run this after changing a command.

python scripts/commands_page.py

A test compares the page with `page()`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from foreprop.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"

HEAD = """\
# Commands

<!-- Made by scripts/commands_page.py from foreprop.cli: edit that, not this page. -->

Every command of `foreprop`, as its `--help` has it. Options may stand in any order; after the
script of `foreprop run` they are the script's.
"""


def page() -> str:
    """The page's whole text."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("foreprop", [], resilient_parsing=True)
    return HEAD + "".join(_section(path, command) for path, command in _commands(root, context))


def _commands(group: Any, context: Any) -> Iterator[tuple[str, Any]]:
    """All that can be called, by their full names, in the order of ``--help``."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        path = f"{context.info_name} {name}"
        if hasattr(command, "list_commands"):
            inner = type(context)(command, info_name=path, parent=None)
            yield from _commands(command, inner)
        elif command is not None and not command.hidden:
            yield path, command


def _section(path: str, command: Any) -> str:
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    usage = f"    {path} [OPTIONS] {' '.join(_argument(p) for p in shown if _is_argument(p))}"
    rows = [_row(param) for param in shown]
    head = ["", "| option or argument | default | meaning |", "| --- | --- | --- |"]
    table = "\n".join([*head, *rows, ""]) if rows else ""
    return f"\n## `{path}`\n\n{usage.rstrip()}\n\n{_prose(command.help or '')}\n{table}"


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    if not param.required and not name.startswith("["):
        name = f"[{name}]"
    return name if param.nargs == 1 or name.endswith("...") else f"{name}..."


def _row(param: Any) -> str:
    names = [_argument(param)] if _is_argument(param) else [*param.opts, *param.secondary_opts]
    called = ", ".join(f"`{name}`" for name in names)
    return f"| {called} | {_cell(_default(param))} | {_cell(param.help or '')} |"


def _default(param: Any) -> str:
    """As ``--help`` shows it; a flag has none."""
    if param.required:
        return "required"
    shown = getattr(param, "show_default", None)
    if isinstance(shown, str):
        return shown
    if param.default in (None, (), [], "") or isinstance(param.default, bool) or shown is False:
        return ""
    if isinstance(param.default, list | tuple):
        return ", ".join(map(str, param.default))
    value = str(getattr(param.default, "value", param.default))
    return "" if value == sys.executable else value  # the page is every machine's


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/").replace("<", "&lt;").replace("*", "\\*")


def _prose(text: str) -> str:
    """The help's paragraphs, in the lines that they have."""
    return inspect.cleandoc(text).replace("\b\n", "").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
