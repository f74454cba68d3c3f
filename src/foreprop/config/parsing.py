"""Settings that are given as text: in the environment, or on a command line."""

from __future__ import annotations

from typing import Any, get_args

from foreprop.config.environment import choices_in
from foreprop.errors import ConfigError


def parse_setting(name: str, text: str, hint: Any) -> Any:
    """Read a setting from text (environment, command line); names it in the error."""
    kinds = get_args(hint) or (hint,)
    if type(None) in kinds and text.lower() in {"", "none"}:
        return None
    if text in choices_in(hint):
        return text
    if hint is bool:
        return _parse_switch(name, text)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError as error:
                number = "a whole number" if kind is int else "a number"
                wanted = " or ".join([number, *map(repr, filter(None, choices_in(hint)))])
                raise ConfigError(f"{name} is {text!r}; it must be {wanted}") from error
    return text


def _parse_switch(name: str, text: str) -> bool:
    meant = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in meant:
        raise ConfigError(f"{name} is {text!r}; it must be one of {list(meant)}")
    return meant[text.lower()]
