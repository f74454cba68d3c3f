"""Checks of the settings that few sessions have: codecs, addresses, ports, traced steps, pairs.

A training that sets none of them does not load this module. All checks raise `ConfigError`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from foreprop.config.combinations import check_combinations, settled
from foreprop.config.otherwords import advice_on_name, advice_on_value, answer_to_value
from foreprop.core.codec import NONE, choices_of, choices_text, is_automatic
from foreprop.core.codecfacts import allowed_by
from foreprop.core.linkshares import parse_late_nodes, parse_node_rates
from foreprop.core.manifest import MOST_PROCESSES
from foreprop.core.rowinit import check_table_init
from foreprop.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from foreprop.config.settings import Config

_HIGHEST_PORT = 65_535
_RANGE = re.compile(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", re.ASCII)
_WINDOW = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)
_WIRE_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""The `Config.wire_dtype` that does the same as a codec for all parameters."""


def parse_windows(text: str) -> tuple[range, ...]:
    """The steps in the setting ``trace_steps``, as ``10-19,1000``."""
    windows = []
    for part in text.split(","):
        found = _WINDOW.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                f"trace_steps is {text!r}; it must be steps from 1 as FIRST-LAST, several separated"
                " by commas: 10-19 or 10-19,1000-1009"
            )
        windows.append(range(first, last + 1))
    return tuple(windows)


def parse_port_range(text: str) -> range:
    """The ports in the setting ``port_range``, as ``29600-29699``."""
    found = _RANGE.fullmatch(text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last <= _HIGHEST_PORT:
        raise ConfigError(
            f"port_range is {text!r}; it must be FIRST-LAST, ports from 1 to {_HIGHEST_PORT}, as"
            " 29600-29699"
        )
    return range(first, last + 1)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """The servers in the setting ``join``, as ``HOST:PORT`` or ``[ADDRESS]:PORT``, with commas."""
    found = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"join is {text!r}; it must be HOST:PORT of a server, as 10.0.0.1:29600, or several"
                " with commas"
            )
        found.append((host, int(port)))
    return found


def check_settings(config: Config) -> None:
    """Check values that have the types of their settings."""
    if config.servers_per_node == 0 and config.dedicated_servers == 0:
        raise ConfigError(
            "servers_per_node and dedicated_servers are both 0; someone must hold parameters"
        )
    if config.architecture == "ps" and not config.dedicated_servers:
        raise ConfigError("architecture is 'ps'; set dedicated_servers to their number")
    if config.encryption is not None:
        _check_encryption(config)
    if config.max_workers is not None and config.max_workers > MOST_PROCESSES:
        raise ConfigError(
            f"max_workers is {config.max_workers}; it must be at most {MOST_PROCESSES}"
        )
    _check_texts(config)
    for name in ("clip_grad_norm", "clip_grad_value"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value!r}; it must be above 0")
    if config.ema is not None and not 0 < config.ema < 1:
        raise ConfigError(f"ema is {config.ema!r}; it must be above 0 and below 1")
    if config.silence_report_s > config.silence_timeout_s:
        raise ConfigError(
            f"silence_report_s is {config.silence_report_s:g} and silence_timeout_s is"
            f" {config.silence_timeout_s:g}: who counts as lost must have been told of before"
        )
    check_combinations(config)


def settle(config: Config) -> None:
    """Make ``compression`` a text, and replace ``auto`` where other settings leave no choice."""
    given = config.compression
    if given is not None:
        if isinstance(given, Mapping):
            object.__setattr__(config, "compression", _choices_text(given))
        _settle_codecs(config)
    for name, value in settled(config).items():
        object.__setattr__(config, name, value)


def _settle_codecs(config: Config) -> None:
    text = config.compression
    if not isinstance(text, str):
        raise ConfigError(
            f"compression is {text!r}; it must be a codec's name, or codecs by patterns of"
            " parameters' names: {'*.weight': 'lossless'}" + answer_to_value("compression", text)
        )
    if is_automatic(text):
        allowed_by(text)
        return
    choices = choices_of(text)
    if all(codec == NONE for _, codec in choices):
        object.__setattr__(config, "compression", None)
    elif config.architecture in ("ring", "hybrid", "auto") and len(choices) == 1:
        pattern, codec = choices[0]
        wire_dtype = _WIRE_DTYPES.get(codec) if pattern == "*" else None
        if wire_dtype is not None and config.wire_dtype in (None, wire_dtype):
            object.__setattr__(config, "wire_dtype", wire_dtype)
            object.__setattr__(config, "compression", None)


def _choices_text(choices: Mapping[Any, Any]) -> str:
    for pattern, codec in choices.items():
        known = isinstance(pattern, str) and isinstance(codec, str)
        if not known or set(f"{pattern}{codec}") & set(",="):
            raise ConfigError(
                f"compression has {pattern!r}: {codec!r}; both must be text without , and ="
            )
    return choices_text(choices.items())


def _check_encryption(config: Config) -> None:
    if config.secret_file is None:
        raise ConfigError(
            f"encryption is {config.encryption!r}, whose keys are made of the job's secret: set"
            " secret_file (FOREPROP_SECRET_FILE; `foreprop run` does so by itself)"
        )
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            f"encryption is {config.encryption!r}, whose keys are made by the package cryptography,"
            f" which is not installed: {how_to_install('tls')}"
        )


def _check_texts(config: Config) -> None:
    if config.port_range is not None:
        parse_port_range(config.port_range)
    if config.node_rates is not None:
        parse_node_rates(config.node_rates)
    if config.late_nodes is not None:
        parse_late_nodes(config.late_nodes)
    if config.join is not None:
        parse_addresses(config.join)
    if config.trace_steps is not None:
        parse_windows(config.trace_steps)
    if config.table_init is not None:
        check_table_init(config.table_init)
    if config.counted_replay is not None and not Path(config.counted_replay).is_dir():
        raise ConfigError(f"counted_replay is {config.counted_replay!r}, which is no folder")


def check_elastic(config: Config) -> None:
    """Check that a worker which is about to join a session is elastic itself."""
    if not config.elastic:
        raise ConfigError(
            f"join is {config.join!r}, and elastic is False: only an elastic session takes in a"
            " worker; set elastic=True as for the others"
        )


# Names that nobody knows.
def unknown_setting(name: str, known: Collection[str]) -> ConfigError:
    """The error about a name that is not among ``known``, the names of all settings."""
    advice = advice_on_name(name, known) or "; `foreprop config --all` lists them"
    return ConfigError(f"no setting is called {name!r}{advice}")


def refuse_names(
    given: Collection[str], known: Collection[str], preset: str, presets: Collection[str]
) -> NoReturn:
    """Raise the error about a setting that is not known, or else about the preset."""
    for name in given:
        if name not in known:
            raise unknown_setting(name, known)
    advice = advice_on_value("preset", preset, presets)
    raise ConfigError(f"preset is {preset!r}; it must be one of {list(presets)}{advice}")


def with_advice(error: TypeError, given: Collection[str], known: Collection[str]) -> TypeError:
    """Python's error about an unknown argument, with the setting that is close (as 3.14 has)."""
    unknown = next((name for name in given if name not in known), None)
    advice = "" if unknown is None else advice_on_name(unknown, known)
    return TypeError(str(error).partition(". Did you mean")[0] + advice) if advice else error
