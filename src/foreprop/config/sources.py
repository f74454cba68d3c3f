"""Where each setting's value comes from, for commands to print."""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any

from foreprop.config.environment import preset_from_environment, settings_from_environment
from foreprop.config.settings import PRESETS, Config


def resolve_with_sources(
    preset: str | None = None, /, **explicit: Any
) -> tuple[Config, dict[str, str]]:
    """The config that `Config.resolve` makes, and by setting where its value came from."""
    config = Config.resolve(preset, **explicit)
    environment = settings_from_environment(typing.get_type_hints(Config))
    name_of_preset = preset or preset_from_environment() or "p3"
    sources = {
        spec.name: "argument"
        if spec.name in explicit
        else "environment"
        if spec.name in environment
        else f"preset {name_of_preset}"
        if spec.name in PRESETS[name_of_preset]
        else "default"
        for spec in fields(Config)
    }
    return config, sources
