"""What values a setting may have, and how they are read from text."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable
from typing import Any, Literal, get_args

from foreprop.errors import ConfigError


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
