"""The environment's variables, and which values a setting may have.

Nobody else reads variables of settings or torchrun's; `config.launchers` has what else launchers
set. Settings are read from text by their types, and checked for those.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from foreprop.errors import ConfigError

LOGGER = logging.getLogger("foreprop")
"""Everything that a session reports to a person."""

_PREFIX = "FOREPROP_"
_SWITCHES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_OTHER_NAMES = ("preset", "data", "steps_file", "servers_file")


def settings_from_environment(hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings that the environment has; ``hints`` are all settings' types."""
    known = [name.upper() for name in (*hints, *_OTHER_NAMES)]
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX)
        if name != variable and name not in known:
            from foreprop.config.otherwords import advice_on_name

            advice = advice_on_name(name, known, prefix=_PREFIX)
            LOGGER.warning("%s is set, but is no setting%s", variable, advice)
    variables = {name: f"{_PREFIX}{name.upper()}" for name in hints}
    return {
        name: parse_setting(variable, os.environ[variable], hints[name])
        for name, variable in variables.items()
        if variable in os.environ
    }


def parse_setting(name: str, text: str, hint: Any) -> Any:
    """Read a setting from text (environment, command line); raises `ConfigError` with its name."""
    kinds = get_args(hint) or (hint,)
    if type(None) in kinds and text.lower() in {"", "none"}:
        return None
    if text in choices_in(hint):
        return text
    if hint is bool:
        if text.lower() not in _SWITCHES:
            raise ConfigError(f"{name} is {text!r}; it must be one of {list(_SWITCHES)}")
        return _SWITCHES[text.lower()]
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError as error:
                number = "a whole number" if kind is int else "a number"
                wanted = " or ".join([number, *map(repr, filter(None, choices_in(hint)))])
                raise ConfigError(f"{name} is {text!r}; it must be {wanted}") from error
    return text


def preset_from_environment() -> str | None:
    return os.environ.get("FOREPROP_PRESET") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """This process's place in the world, as torchrun says; ``launched`` is whether anybody does."""

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


def may_grow() -> bool:
    """Whether workers may join a world of one, or this one joins another world."""
    return bool(os.environ.get("FOREPROP_MAX_WORKERS") or os.environ.get("FOREPROP_JOIN"))


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
    choices = choices_in(hint)
    kinds = tuple(kind for kind in get_args(hint) or (hint,) if isinstance(kind, type))
    if choices and (value in choices or not set(kinds) - {type(None)}):
        if value not in choices:
            from foreprop.config.otherwords import advice_on_value

            advice = advice_on_value(spec.name, value, choices)
            raise ConfigError(
                f"{spec.name} is {value!r}; it must be one of {list(choices)}{advice}"
            )
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


def choices_in(hint: Any) -> tuple[Any, ...]:
    """The values that a Literal allows, also one that is optional or beside other types."""
    if typing.get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint)
    inner = next((part for part in parts if typing.get_origin(part) is Literal), None)
    nothing = (None,) if type(None) in parts else ()
    return (*get_args(inner), *nothing) if inner is not None else ()


# What is reported to a person.
class _ReportHandler(logging.StreamHandler[Any]):
    """Writes reports on standard error, unless the program has a handler that shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in (*LOGGER.handlers, *logging.root.handlers):
            if isinstance(handler, logging.StreamHandler):
                # a stream that is a file, or a text in memory, is read later, if at all
                is_shown = handler is not self and handler.stream in (sys.stderr, sys.stdout)
            else:
                is_shown = not isinstance(handler, logging.NullHandler)
            if is_shown:
                return
        self.stream = sys.stderr  # as it is now
        super().emit(record)


_report_handler = _ReportHandler()
_report_handler.setFormatter(logging.Formatter("foreprop: %(message)s"))
LOGGER.addHandler(_report_handler)
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)
