"""All commands, as one table: a command is one line, and is imported when it is called.

To add one, write a function with annotated parameters, as `foreprop.tools.cli.config.config`, and
put a line here. Its docstring's first sentence is the summary, its last paragraph has examples. The
name may have a group before it (``lab run``). Another distribution adds its own with an entry point
of `GROUP`, a sequence of `Entry`: foreprop-lab does.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from foreprop.errors import INSTALL_LAB, ConfigError, how_to_install
from foreprop.tools.cli.checked import CheckedCommand, is_cut

GROUP = "foreprop.commands"
TRAIN, DECIDE, MEASURE = "Train", "Decide and examine", "Measure"
PANELS = (TRAIN, DECIDE, MEASURE)


class NotInstalled(ConfigError):
    """A package that a command needs is not installed; the command was typed correctly."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One command; ``source`` is ``module:name`` of a function or a `typer.Typer`."""

    name: str
    source: str
    summary: str
    panel: str
    missing: str = ""
    """The distribution that has the command, where that is not installed."""


GROUPS = {"lab": "Measure systems side by side on a cluster of network namespaces on this machine."}
SUMMARIES = {
    TRAIN: """
    run: Train on several machines: start torchrun on every host of a file, and watch over it.
    server: Run dedicated servers for a script that says parallelize(..., dedicated_servers=K).
    """,
    DECIDE: """
    plan: Predict each architecture and preset on a cluster, and say which to use and why.
    doctor: Check hosts before training: names, addresses, ports, versions, clocks, links, rates.
    config: Show a script's settings and what differs from the defaults, or all with their meanings.
    trace: Lay the traces of one run's workers and servers into one file for Perfetto.
    compare: Run your own script with DDP and with foreprop, in turns, and lay them side by side.
    report: Make one HTML page of a job's traces: time per step, waiting, and a timeline.
    top: Show all ranks of a training: step, time per step, waiting, traffic, and what failed.
    """,
}
"""Commands by panel of the help, one a line, which goes on where the next one is set in."""
LAB_SUMMARIES = {
    TRAIN: """
    demo: Train a small network on Fashion-MNIST with P3, its baseline and DDP, side by side.
    """,
    MEASURE: """
    bench: Measure foreprop itself.
    """,
}
"""foreprop-lab's commands without a group, as `SUMMARIES`; they are listed without it, too."""
_LAB = "foreprop-lab"
_TAKE_SCRIPTS = ("run", "compare")
"""Commands whose first argument is a script; all arguments after it are the script's."""


def table(
    summaries: dict[str, str], source: Callable[[str], str], *, missing: str = ""
) -> Iterator[Entry]:
    """Commands as `SUMMARIES` lays them out; ``source`` says where one of a name is."""
    for panel, lines in summaries.items():
        for line in lines.replace("\n        ", " ").strip().splitlines():
            name, _, summary = line.strip().partition(": ")
            yield Entry(name, source(name), summary, panel, missing)


@functools.cache
def commands() -> tuple[Entry, ...]:
    """The commands that are installed, by panel."""
    found: list[Entry] = []
    for point in entry_points(group=GROUP):
        found += point.load()
    names = {entry.name.partition(" ")[0] for entry in found}
    groups = (Entry(name, "", summary, MEASURE, _LAB) for name, summary in GROUPS.items())
    others = (*groups, *table(LAB_SUMMARIES, lambda name: "", missing=_LAB))
    found += [entry for entry in others if entry.name not in names]
    found += table(SUMMARIES, "foreprop.tools.cli.{0}:{0}".format)
    return tuple(sorted(found, key=lambda entry: PANELS.index(entry.panel)))


def command_of(entry: Entry) -> Any:
    """The command, imported; raises `NotInstalled` if its code or a library of it is not there."""
    what = f"`foreprop {entry.name}`"
    if entry.missing:
        raise NotInstalled(
            f"{what} is a command of {entry.missing}, which is not installed: {INSTALL_LAB}"
        )
    module, _, attribute = entry.source.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise missing_library(what, error) from error
    name = entry.name.rpartition(" ")[2]
    app = found
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(cls=CheckedCommand)(found)
    command = typer.main.get_command(app)
    command.name, command.rich_help_panel = name, entry.panel  # type: ignore[attr-defined]
    if entry.name in _TAKE_SCRIPTS:
        command.context_settings["allow_interspersed_args"] = False
    return command


_EXTRAS = {
    "jinja2": "report",
    "matplotlib": "plots",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def missing_library(what: str, error: ModuleNotFoundError) -> NotInstalled:
    extra = _EXTRAS.get(error.name or "")
    how = how_to_install(extra) if extra else INSTALL_LAB
    return NotInstalled(f"{what} needs {error.name}, which is not installed: {how}")


class Listed(TyperCommand):
    """A line of a group's help, which is wrapped and not cut."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return self.help or ""


class LazyGroup(TyperGroup):
    """The commands of the table that begin with ``within``, imported when they are called."""

    def __init__(self, *, within: str = "", **others: Any) -> None:
        others |= {"no_args_is_help": False}
        if within:
            others |= {"help": GROUPS[within], "callback": None}
        super().__init__(**others)
        self._within, self._only_shows = within, False
        self.commands: dict[str, Any] = {}
        for entry in commands():
            first, _, name = entry.name.rpartition(" ")
            if first == within:
                self.commands[name] = Listed(name, help=entry.summary, rich_help_panel=entry.panel)
            elif not within and first not in self.commands:
                self.commands[first] = Listed(first, help=GROUPS[first], rich_help_panel=MEASURE)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, which is imported for that; for help and completion what they show."""
        shown = self.commands.get(cmd_name)
        if shown is None or self._only_shows:
            return shown
        name = f"{self._within} {cmd_name}".strip()
        entry = next((entry for entry in commands() if entry.name == name), None)
        return LazyGroup(name=name, within=name) if entry is None else command_of(entry)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            if plain := ctx.get_help():  # what has frames is printed by now
                typer.echo(plain)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Draw frames as a command does, or where those would cut a word plain text."""

        def draw(group: LazyGroup) -> None:
            super().format_help(ctx, formatter)

        def draw_whole() -> None:
            plain = copy.copy(self)
            plain.rich_markup_mode = None
            draw(plain if is_cut(lambda: draw(self)) else self)

        self._without_imports(draw_whole)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        return self._without_imports(lambda: super(LazyGroup, self).shell_complete(ctx, incomplete))

    def _without_imports(self, act: Callable[[], Any]) -> Any:
        self._only_shows = True
        try:
            return act()
        finally:
            self._only_shows = False
