"""The option ``--presets``: several names, separated by commas."""

from __future__ import annotations

from foreprop.config import PRESETS
from foreprop.errors import ConfigError


def presets_from(text: str) -> tuple[str, ...]:
    """Each name once, in their order; raises `ConfigError` for a name that there is not."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names or ("",):
        if name not in PRESETS:
            raise ConfigError(f"preset is {name!r}; it must be one of {list(PRESETS)}")
    return names
