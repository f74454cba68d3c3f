"""Write docs/commands.md and lab/docs/commands.md from the command line itself.

python scripts/commands_page.py        # after changing a command

A test compares the pages with `pages()`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from foreprop.tools.cli.app import app
from foreprop.tools.cli.registry import commands

ROOT = Path(__file__).parents[1]

HEAD = """\
# Commands

<!-- Made by scripts/commands_page.py from foreprop.tools.cli: edit that, not this page. -->

Every command of `foreprop`, as its `--help` has it. Options may stand in any order; after the
script of `foreprop run` they are the script's. `foreprop demo`, `lab` and `bench` are [the
lab's](../lab/docs/commands.md).
"""
LAB_HEAD = """\
# Commands

<!-- Made by scripts/commands_page.py from foreprop_lab.commands: edit that, not this page. -->

Every command that foreprop-lab adds to `foreprop`, as its `--help` has it. Options may stand in any
order. The [other commands](../../docs/commands.md) are foreprop's own.
"""


def pages() -> dict[Path, str]:
    """The text of each page."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("foreprop", [], resilient_parsing=True)
    lab = {entry.name.split()[0] for entry in commands() if entry.source.startswith("foreprop_lab")}
    own, others = [], []
    for path, command in _commands(root, context):
        (others if path.split()[1] in lab else own).append(_section(path, command))
    return {
        ROOT / "docs" / "commands.md": HEAD + "".join(own),
        ROOT / "lab" / "docs" / "commands.md": LAB_HEAD + "".join(others),
    }


def _commands(group: Any, context: Any) -> Iterator[tuple[str, Any]]:
    """All commands by their full names, in the order of ``--help``."""
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
    """The default as ``--help`` shows it; a flag has none."""
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
    """The help's paragraphs, with the line breaks that they have."""
    return inspect.cleandoc(text).replace("\b\n", "").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text)
