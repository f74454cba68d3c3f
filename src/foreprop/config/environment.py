"""What values settings may have, and how text is read: that of the environment's variables.

The only module that reads those.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from foreprop.errors import ConfigError

LOGGER = logging.getLogger("foreprop")
"""All that is reported to a person while a session is there."""

_PREFIX = "FOREPROP_"
_OTHER_NAMES = ("preset", "data")


def settings_from_environment(hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the settings that are set there; ``hints`` are the types of all."""
    known = [name.upper() for name in (*hints, *_OTHER_NAMES)]
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX)
        if name != variable and name not in known:
            advice = did_you_mean(name, known, prefix=_PREFIX)
            LOGGER.warning("%s is set, but is no setting%s", variable, advice)
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


def child_environment() -> dict[str, str]:
    """The environment for a server that this process starts: it takes no part in torchrun."""
    ours = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("FOREPROP_", "TORCHELASTIC_"))
    } | {"OMP_NUM_THREADS": "1"}


def check_value(spec: dataclasses.Field[Any], value: Any, hint: Any) -> None:
    choices = _choices(hint)
    kinds = tuple(kind for kind in get_args(hint) or (hint,) if isinstance(kind, type))
    if choices and (value in choices or not set(kinds) - {type(None)}):
        if value not in choices:
            raise ConfigError(f"{spec.name} is {value!r}; it must be one of {list(choices)}")
        return
    if float in kinds:
        kinds = (*kinds, int)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        named = ["nothing" if kind is type(None) else kind.__name__ for kind in kinds]
        wanted = " or ".join([*named, *(repr(choice) for choice in choices if choice)])
        raise ConfigError(f"{spec.name} is {value!r}; it must be {wanted}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{spec.name} is {value!r}; it must be a finite number")
    minimum = spec.metadata["minimum"]
    if minimum is not None and value is not None and not value >= minimum:
        raise ConfigError(f"{spec.name} is {value!r}; it must be at least {minimum}")


def _choices(hint: Any) -> tuple[Any, ...]:
    """What a Literal allows, or an optional one."""
    if typing.get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint)
    inner = next((part for part in parts if typing.get_origin(part) is Literal), None)
    nothing = (None,) if type(None) in parts else ()
    return (*get_args(inner), *nothing) if inner is not None else ()


def parse_setting(name: str, text: str, hint: Any) -> Any:
    """Read a setting from text (environment, command line); names it in the error."""
    kinds = get_args(hint) or (hint,)
    if type(None) in kinds and text.lower() in {"", "none"}:
        return None
    if text in _choices(hint):
        return text
    if hint is bool:
        return _parse_switch(name, text)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError as error:
                number = "a whole number" if kind is int else "a number"
                wanted = " or ".join([number, *map(repr, filter(None, _choices(hint)))])
                raise ConfigError(f"{name} is {text!r}; it must be {wanted}") from error
    return text


def _parse_switch(name: str, text: str) -> bool:
    meant = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in meant:
        raise ConfigError(f"{name} is {text!r}; it must be one of {list(meant)}")
    return meant[text.lower()]


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """To be added to an error about ``name``: the known name that is closest, if one is close.

    ``prefix``: what stands before each of them where the user writes it.
    """
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix + found[0]!r}?" if found else ""


# What is reported to a person.
class _StandardError(logging.StreamHandler[Any]):
    """Shows what is reported, as long as the program has not said where else it is to be seen."""

    def emit(self, record: logging.LogRecord) -> None:
        if any(_is_to_be_seen(handler) for handler in (*LOGGER.handlers, *logging.root.handlers)):
            return
        self.stream = sys.stderr  # as it is now
        super().emit(record)


def _is_to_be_seen(handler: logging.Handler) -> bool:
    """A stream that is a file, or a text in memory, is looked at later, if at all."""
    if isinstance(handler, logging.StreamHandler):
        return handler is not _shown and handler.stream in (sys.stderr, sys.stdout)
    return not isinstance(handler, logging.NullHandler)


_shown = _StandardError()
_shown.setFormatter(logging.Formatter("foreprop: %(message)s"))
LOGGER.addHandler(_shown)
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)
