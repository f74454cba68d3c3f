"""All commands, as one table: a command is one line, and is imported when it is called.

To add one, write a function with annotated parameters, as `foreprop.cli.config.config`, and put a
line here. Its docstring's first sentence is the summary, its last paragraph has examples. The name
may have a group before it (``lab run``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from foreprop.cli.checked import CheckedCommand, is_cut
from foreprop.cli.clone import load, missing_extra

TRAIN, DECIDE, MEASURE = "Train", "Decide and examine", "Measure"


@dataclass(frozen=True, slots=True)
class Entry:
    """One command; ``source`` is ``module:name`` of a function or a `typer.Typer`."""

    name: str
    source: str
    summary: str
    panel: str = MEASURE
    from_clone: bool = False
    """Its code is in no wheel."""
    takes_script: bool = False
    """What follows its first argument is that script's."""


GROUPS = {"lab": "Measure systems side by side on a cluster of network namespaces on this machine."}

COMMANDS = (
    Entry(
        "demo",
        "foreprop.cli.demo:demo",
        "Train a small network on Fashion-MNIST with P3, its baseline and DDP, side by side.",
        TRAIN,
    ),
    Entry(
        "run",
        "foreprop.cli.run:run",
        "Train on several machines: start torchrun on every host of a file, and watch over it.",
        TRAIN,
        takes_script=True,
    ),
    Entry(
        "server",
        "foreprop.cli.server:server",
        "Run dedicated servers for a script that says parallelize(..., dedicated_servers=K).",
        TRAIN,
    ),
    Entry(
        "plan",
        "foreprop.cli.plan:plan",
        "Predict each architecture and preset on a cluster, and say which to use and why.",
        DECIDE,
    ),
    Entry(
        "doctor",
        "foreprop.cli.doctor:doctor",
        "Check hosts before training: names, addresses, ports, versions, clocks, links, rates.",
        DECIDE,
    ),
    Entry(
        "config",
        "foreprop.cli.config:config",
        "Show the settings that differ from their defaults, or all of them with their meanings.",
        DECIDE,
    ),
    Entry(
        "trace",
        "foreprop.cli.trace:trace",
        "Lay the traces of one run's workers and servers into one file for Perfetto.",
        DECIDE,
    ),
    Entry(
        "compare",
        "foreprop.cli.compare:compare",
        "Run your own script with DDP and with foreprop, in turns, and lay them side by side.",
        DECIDE,
        takes_script=True,
    ),
    Entry(
        "report",
        "foreprop.cli.report:report",
        "Make one HTML page of a job's traces: time per step, waiting, and a timeline.",
        DECIDE,
    ),
    Entry(
        "top",
        "foreprop.cli.top:top",
        "Show all ranks of a training: step, time per step, waiting, traffic, and what failed.",
        DECIDE,
    ),
    Entry(
        "lab run",
        "foreprop.cli.lab:run",
        "Measure several systems in one cluster, their steps interleaved; write results.json.",
    ),
    Entry(
        "lab simulate",
        "foreprop.cli.simulate:simulate",
        "Predict what `run` would measure, without a cluster; write results.json.",
    ),
    Entry(
        "lab layers",
        "experiments.layers.command:layers",
        "Measure real layers, eager and compiled, in one cluster; write results.json.",
        from_clone=True,
    ),
    Entry(
        "lab mlp",
        "experiments.mlp.command:mlp",
        "Train a perceptron on Fashion-MNIST, 1 to 7 workers; write results.json and figures.",
        from_clone=True,
    ),
    Entry(
        "lab language",
        "experiments.language.command:language",
        "Train a language model on WikiText-2's 76,616 types, sparse and dense; write its records.",
        from_clone=True,
    ),
    Entry(
        "lab accuracy",
        "experiments.accuracy.command:accuracy",
        "Train a small model with real gradients on real data, many times, and compare scores.",
        from_clone=True,
    ),
    Entry(
        "lab faults",
        "experiments.faults.command:faults",
        "Train through a slow link, a stop, a cut, a kill and a rejoin; draw throughput over time.",
        from_clone=True,
    ),
    Entry(
        "lab figures",
        "experiments.figures.command:figures",
        "Run what the paper's figures need and draw them, each with its data, and a page of all.",
        from_clone=True,
    ),
    Entry("bench", "benchmarks.command:bench", "Measure foreprop itself.", from_clone=True),
)


def command_of(entry: Entry) -> Any:
    """Import it. Raises `foreprop.errors.ConfigError` if its code, or an extra, is not there."""
    if entry.from_clone:
        found = load(entry.source, f"`foreprop {entry.name}`")
    else:
        module, _, attribute = entry.source.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise missing_extra(f"`foreprop {entry.name}`", error) from error
    name = entry.name.rpartition(" ")[2]
    command = typer.main.get_command(found if isinstance(found, typer.Typer) else _alone(found))
    command.name, command.rich_help_panel = name, entry.panel  # type: ignore[attr-defined]
    if entry.takes_script:
        command.context_settings["allow_interspersed_args"] = False
    return command


def _alone(function: Callable[..., None]) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command(cls=CheckedCommand)(function)
    return app


class LazyCommands(MutableMapping[str, Any]):
    """By name, those of a group; each is imported when it is asked for."""

    def __init__(self, group: str = "") -> None:
        self._lazy: dict[str, Callable[[], Any]] = {}
        self._loaded: dict[str, Any] = {}
        self.listed: dict[str, Any] = {}
        """What a help shows of each, for which nothing is imported."""
        for entry in COMMANDS:
            first, _, name = entry.name.rpartition(" ")
            if first == group:
                self._lazy[name] = partial(command_of, entry)
                self.listed[name] = _listed(name, entry.summary, entry.panel)
            elif not group and first not in self._lazy:
                self._lazy[first] = partial(LazyGroup, name=first, within=first)
                self.listed[first] = _listed(first, GROUPS[first], MEASURE)

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._lazy[name]()
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._lazy[name] = lambda: command
        self.listed[name] = command

    def __delitem__(self, name: str) -> None:
        del self._lazy[name], self.listed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lazy)

    def __len__(self) -> int:
        return len(self._lazy)

    def __contains__(self, name: object) -> bool:
        return name in self._lazy


def _listed(name: str, summary: str, panel: str) -> TyperCommand:
    return Listed(name, help=summary, rich_help_panel=panel)


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
        self.commands: MutableMapping[str, Any] = LazyCommands(within)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            if plain := ctx.get_help():  # what has frames is printed by now
                typer.echo(plain)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As a command's: in frames, or where those would cut a word as plain text."""

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
        whole = self.commands
        self.commands = whole.listed if isinstance(whole, LazyCommands) else whole
        try:
            return act()
        finally:
            self.commands = whole
