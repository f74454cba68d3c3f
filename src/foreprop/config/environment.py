"""What values settings may have, and those of the environment's variables.

The only module that reads those.
"""

from __future__ import annotations

import dataclasses
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
_OTHER_NAMES = ("preset", "data", "steps_file", "servers_file")


def settings_from_environment(hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the settings that are set there; ``hints`` are the types of all."""
    known = [name.upper() for name in (*hints, *_OTHER_NAMES)]
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX)
        if name != variable and name not in known:
            from foreprop.config.otherwords import answer_to_name

            advice = answer_to_name(name) or did_you_mean(name, known, prefix=_PREFIX)
            LOGGER.warning("%s is set, but is no setting%s", variable, advice)
    variables = {name: f"{_PREFIX}{name.upper()}" for name in hints}
    given = {name: variables[name] for name in hints if variables[name] in os.environ}
    if not given:
        return {}
    from foreprop.config.parsing import parse_setting

    return {
        name: parse_setting(variable, os.environ[variable], hints[name])
        for name, variable in given.items()
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


def may_grow() -> bool:
    """Whether workers may come to a world of one, or this is one that does."""
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
            from foreprop.config.otherwords import answer_to_value

            advice = answer_to_value(spec.name, value) or did_you_mean(str(value), choices)
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
    """What a Literal allows, or an optional one."""
    if typing.get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint)
    inner = next((part for part in parts if typing.get_origin(part) is Literal), None)
    nothing = (None,) if type(None) in parts else ()
    return (*get_args(inner), *nothing) if inner is not None else ()


def did_you_mean(name: str, known: Iterable[object], *, prefix: str = "") -> str:
    """To be added to an error about ``name``: the known name that is close, or a few that may be.

    ``prefix``: what stands before each of them where the user writes it.
    """
    from foreprop.config.otherwords import near_names

    return near_names(name, list(known), prefix)


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
