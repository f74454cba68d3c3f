"""The environment's variables. The only module that reads them."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foreprop.config.values import did_you_mean, parse_setting
from foreprop.errors import ConfigError

_PREFIX = "FOREPROP_"
_OTHER_NAMES = ("preset", "data")


def settings_from_environment(hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the settings that are set there; ``hints`` are the types of all."""
    known = [name.upper() for name in (*hints, *_OTHER_NAMES)]
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX)
        if name != variable and name not in known:
            advice = did_you_mean(name, known, prefix=_PREFIX)
            print(f"foreprop: {variable} is set, but is no setting{advice}", file=sys.stderr)
    variables = {f"{_PREFIX}{name.upper()}": name for name in hints}
    return {
        name: parse_setting(variable, os.environ[variable], hints[name])
        for variable, name in variables.items()
        if variable in os.environ
    }


def preset_from_environment() -> str | None:
    return os.environ.get("FOREPROP_PRESET") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """What torchrun (or nobody) says about this process."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_address: str
    master_port: int | None
    attempt: int
    launched: bool


def launch_info() -> LaunchInfo:
    """Read torchrun's variables; without them the world is this process alone."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world_size = _int_variable("WORLD_SIZE", 1) if launched else 1
    return LaunchInfo(
        rank=_int_variable("RANK", 0) if launched else 0,
        local_rank=_int_variable("LOCAL_RANK", 0) if launched else 0,
        world_size=world_size,
        local_world_size=_int_variable("LOCAL_WORLD_SIZE", world_size) if launched else 1,
        master_address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_int_variable("MASTER_PORT", 29500) if "MASTER_PORT" in os.environ else None,
        attempt=_int_variable("TORCHELASTIC_RESTART_COUNT", 0),
        launched=launched,
    )


def _int_variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; it must be a whole number") from error


def foreign_setting(name: Literal["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"]) -> str | None:
    """A variable of torch's, for ``foreprop doctor`` to show; None if it is not set."""
    return os.environ.get(name)


def child_environment() -> dict[str, str]:
    """The environment for a server that this process starts: it takes no part in torchrun."""
    ours = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("FOREPROP_", "TORCHELASTIC_"))
    } | {"OMP_NUM_THREADS": "1"}


def environment_for_hosts(names: Sequence[str] = ()) -> dict[str, str]:
    """What workers on other machines get of this environment: the settings, and ``NAME[=VALUE]``.

    An ``interface`` that is an address is this machine's alone, and stays here. Raises
    `ConfigError`.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith("FOREPROP_")}
    if _is_address(found.get("FOREPROP_INTERFACE", "")):
        del found["FOREPROP_INTERFACE"]
    for text in names:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"env is {text!r}; it must be NAME or NAME=VALUE")
        if not equals and name not in os.environ:
            raise ConfigError(f"env is {text!r}, which is not set here; set it or say {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def cache_directory() -> Path:
    """Where downloaded data sets are kept."""
    chosen = os.environ.get("FOREPROP_DATA")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "foreprop"
