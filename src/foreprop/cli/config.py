"""``foreprop config``: settings, their values, and where these came from."""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.table import Table

from foreprop.cli.output import console, print_json, print_table, say
from foreprop.config import Config
from foreprop.config.checks import unknown_setting
from foreprop.config.parsing import parse_setting
from foreprop.config.sources import resolve_with_sources
from foreprop.errors import ConfigError


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
    """Show the settings that differ from their defaults, or all of them with their meanings.

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
                    "meaning": spec.metadata["help"],
                }
                for spec in fields(chosen)
            }
        )
    elif every:
        print_table(console(), settings_table(chosen, sources))
    else:
        _print_changed(chosen, sources)


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


def _print_changed(chosen: Config, sources: dict[str, str]) -> None:
    changed = [spec for spec in fields(chosen) if getattr(chosen, spec.name) != spec.default]
    shown = _table("setting", "value")
    for spec in changed:
        value = value_text(spec.name, getattr(chosen, spec.name))
        shown.add_row(spec.name, f"{value} ({sources[spec.name]})")
    if changed:
        print_table(console(), shown)
    whose = "All other" if changed else "All"
    say(console(), f"{whose} settings have their defaults: `foreprop config --all` shows them.")


def _table(*headings: str) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        shown.add_column(heading, no_wrap=True)
    return shown


_UNITS = {"_bits_per_s": "bit/s", "_bytes": "bytes", "_elems": "elements", "_s": "s"}
"""By the end of a setting's name; the first that fits."""


def value_text(name: str, value: Any) -> str:
    """A setting's value with its unit."""
    if value is None:
        return "not set"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
    return f"{number} {unit}".strip()


_LEAST_MEANING = 30
"""Characters: in less, words stand below each other."""


def settings_table(chosen: Config, sources: dict[str, str]) -> Table:
    shown = _table("setting", "value", "from")
    shown.add_column("meaning", min_width=_LEAST_MEANING)
    for spec in fields(chosen):
        text = value_text(spec.name, getattr(chosen, spec.name))
        shown.add_row(spec.name, text, sources[spec.name], spec.metadata["help"])
    return shown
