"""``foreprop config``: settings, their values, and where these came from."""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from foreprop.config import Config
from foreprop.config.checks import unknown_setting
from foreprop.config.environment import parse_setting
from foreprop.config.settings import TIERS, settings_in
from foreprop.config.sources import resolve_with_sources
from foreprop.errors import ConfigError
from foreprop.tools.cli.output import console, print_json, print_line, print_table


def config(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Settings, as parallelize() takes them."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="p3 (default), slicing, kvstore, wfbp, tensorflow or p3-2019."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every setting, where its value came from, what it means.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Show a script's settings and what differs from the defaults, or all with their meanings.

    A NAME=VALUE here beats the environment (FOREPROP_ and the name in capitals), which beats the
    preset, which beats the default. A script's parallelize() sees the same environment.

    Examples:
      foreprop config
      foreprop config --all
      foreprop config --preset kvstore slice_elems=100000
      foreprop config --json
    """
    chosen, sources = resolve_with_sources(preset, **settings_from(settings or []))
    if as_json:
        print_json(
            {
                spec.name: {
                    "value": getattr(chosen, spec.name),
                    "from": sources[spec.name],
                    "tier": spec.metadata["tier"],
                    "meaning": spec.metadata["help"],
                }
                for spec in fields(chosen)
            }
        )
    elif every:
        _print_tiers(chosen, sources)
    else:
        _print_first(chosen, sources)


def settings_from(texts: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` texts as arguments of `Config`; raises `ConfigError`."""
    hints = typing.get_type_hints(Config)
    names = [spec.name for spec in fields(Config)]
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not a setting; write it as NAME=VALUE")
        if name == "preset":
            raise ConfigError(f"{text!r} is not a setting; write it as --preset {value}")
        if name not in names:
            raise unknown_setting(name, names)
        found[name] = parse_setting(name, value, hints[name])
    return found


def _print_first(chosen: Config, sources: dict[str, str]) -> None:
    """Print the settings of the first tier, and those of others that differ from their defaults."""
    shown = _table(setting=0, value=0)
    for spec in fields(chosen):
        value = getattr(chosen, spec.name)
        text, usual = value_text(spec.name, value), value_text(spec.name, spec.default)
        if value != spec.default:
            text = f"{text} ({sources[spec.name]}; by default {usual})"
            shown.add_row(spec.name, Text(text), style="bold")
        elif spec.metadata["tier"] == "use":
            shown.add_row(spec.name, text)
    print_table(console(), shown)
    others = f"{len(fields(chosen)) - shown.row_count} other settings"
    print_line(console(), f"{others} have their defaults: `foreprop config --all` shows them.")


def _table(**widths: int) -> Table:
    """``widths``: by heading, the least characters."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, width in widths.items():
        shown.add_column(heading, no_wrap=True, min_width=width)
    return shown


_UNITS = {"_bits_per_s": "bit/s", "_bytes": "bytes", "_elems": "elements", "_s": "s"}
"""Units by the end of a setting's name; the first that fits."""


def value_text(name: str, value: Any) -> str:
    if value is None:
        return "not set"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
    return f"{number} {unit}".strip()


_LEAST_MEANING = 28
"""Characters: in less, words stand below each other."""


def _print_tiers(chosen: Config, sources: dict[str, str]) -> None:
    """Print all settings, a table for each tier, with columns of the same widths."""
    rows = {
        spec.name: (
            spec.name,
            value_text(spec.name, getattr(chosen, spec.name)),
            sources[spec.name],
            spec.metadata["help"],
        )
        for spec in fields(chosen)
    }
    *columns, _ = zip(*rows.values(), strict=True)
    headings = ("setting", "value", "from")
    widths = {head: max(map(len, cells)) for head, cells in zip(headings, columns, strict=True)}
    for tier, heading in TIERS.items():
        shown = _table(**widths)
        shown.title = heading
        shown.add_column("meaning", min_width=_LEAST_MEANING)
        for spec in settings_in(tier, Config):
            shown.add_row(*map(Text, rows[spec.name]))
        print_table(console(), shown)
