"""The user's codecs and optimizers: in modules that a setting names, or in installed packages.

Servers are processes of their own, and know only what they import. Each process imports the modules
of ``plugins``, which register there; an entry point is loaded when its name is asked for. What
workers announce is never imported: `foreprop server` takes the modules of its own environment.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from foreprop.errors import ConfigError

CODECS, OPTIMIZERS = "foreprop.codecs", "foreprop.optimizers"
"""The groups of entry points; an entry has the name of the codec, or of the optimizer's class."""
HOW = "name its module in plugins (FOREPROP_PLUGINS), or install a package with an entry point"


def load_plugins(plugins: str | None) -> None:
    """Import the modules that the setting names, once; raises `ConfigError`."""
    for name in (plugins or "").split(","):
        if not name.strip():
            continue
        try:
            importlib.import_module(name.strip())
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's module makes
            raise ConfigError(
                f"plugins is {plugins!r}, and {name.strip()} cannot be imported here: {error!r}"
            ) from error


def maybe_missing(plugins: str | None) -> str | None:
    """Why a server cannot import the modules; None if it has them all."""
    try:
        load_plugins(plugins)
    except ConfigError as error:
        return str(error)
    return None


def maybe_installed(group: str, name: str) -> Any:
    """The codec or optimizer of this name in an installed package; None if there is none."""
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:
            raise ConfigError(
                f"the entry point {name} of {group} ({entry.value}) cannot be loaded: {error!r}"
            ) from error
    return None
