"""What few sessions set, checked: architectures, compression, ports, the steps traced."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from foreprop.config.environment import did_you_mean
from foreprop.config.otherwords import answer_to_name, answer_to_value
from foreprop.core.codec import NONE, choices_of, choices_text, is_automatic, kind_of
from foreprop.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from foreprop.config.settings import Config

_HIGHEST_PORT = 65_535
_RANGE = re.compile(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", re.ASCII)
_WINDOW = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


_WIRE_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""What these codecs are where everything is cast: `Config.wire_dtype`."""
_RING_CODECS = {"ring": {NONE, "randomk"}, "hybrid": {NONE, "randomk", "lossless"}}
"""Whose codes can be added up; and of rows, which servers have, the exact one."""
UNEVEN_LEFT_OUT = ("kvstore", "strict_round_robin")
"""Placements that have their own rule, whatever links differ."""


def parse_windows(text: str) -> tuple[range, ...]:
    """``trace_steps``: of ``10-19,1000`` the steps 10 to 19 and 1000; raises `ConfigError`."""
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
    """``port_range``: of ``29600-29699`` the ports 29600 to 29699; raises `ConfigError`."""
    found = _RANGE.fullmatch(text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last <= _HIGHEST_PORT:
        raise ConfigError(
            f"port_range is {text!r}; it must be FIRST-LAST, ports from 1 to {_HIGHEST_PORT}, as"
            " 29600-29699"
        )
    return range(first, last + 1)


def check_settings(config: Config) -> None:
    """Raises `ConfigError` for values, each of its setting's type, that cannot be."""
    if config.servers_per_node == 0 and config.dedicated_servers == 0:
        raise ConfigError(
            "servers_per_node and dedicated_servers are both 0; someone must hold parameters"
        )
    _check_architecture(config)
    _check_staleness(config)
    if config.join is not None:
        from foreprop.config.joinaddress import check_join

        check_join(config)
    if config.counts_some or config.buddy_steps is not None or config.max_workers is not None:
        from foreprop.config.countingchecks import check_counting

        check_counting(config)
    _check_aggregation(config)
    if config.silence_report_s > config.silence_timeout_s:
        raise ConfigError(
            f"silence_report_s is {config.silence_report_s:g} and silence_timeout_s is"
            f" {config.silence_timeout_s:g}: who counts as lost must have been told of before"
        )
    if config.trace_steps is not None:
        parse_windows(config.trace_steps)
    if config.table_init is not None:
        from foreprop.core.rowinit import check_table_init

        check_table_init(config.table_init)


def _check_aggregation(config: Config) -> None:
    """Raises `ConfigError` for limits and decays that mean nothing."""
    for name in ("clip_grad_norm", "clip_grad_value"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value!r}; it must be above 0")
    if config.ema is not None and not 0 < config.ema < 1:
        raise ConfigError(f"ema is {config.ema!r}; it must be above 0 and below 1")
    if config.clip_grad_norm is not None and config.clip_grad_value is not None:
        raise ConfigError(
            f"clip_grad_norm is {config.clip_grad_norm!r} and clip_grad_value is"
            f" {config.clip_grad_value!r}; set one of them"
        )


_TOGETHER = {
    "architecture": ("ring", "hybrid", "auto"),
    "update": ("workers",),
    "reply": ("notify", "pull"),
    "local_aggregation": ("on",),
    "slice_elems": ("auto",),
}
"""Values that need all ranks in the same step."""
_OF_ALL = ("rebalance_s clip_grad_norm clip_grad_value ema compression sparse_parameters").split()
"""Settings for what all ranks' gradients of a step make together."""
_INSTEAD = {
    "architecture": "use 'p2p' or 'ps'",
    "update": "leave update out",
    "reply": "use a preset that broadcasts, as p3",
    "clip_grad_norm": "clip each rank's own gradients in hooks (Tensor.register_hook)",
    "clip_grad_value": "clip each rank's own gradients in hooks (Tensor.register_hook)",
    "ema": "average after session.flush(), as torch.optim.swa_utils.AveragedModel does",
    "slice_elems": "give a number",
}


def _check_staleness(config: Config) -> None:
    """What has no meaning where each push is an update by itself, in a step of its own."""
    value = config.staleness
    if value in (0, "late") and config.delay_compensation is not None:
        raise ConfigError(
            f"delay_compensation is {config.delay_compensation!r}, and staleness is {value!r}, with"
            " which all gradients of a step are summed: set staleness to a number of steps or"
            " 'async', or leave it out"
        )
    if value == "late":
        _check_late(config)
    if value in (0, "late"):
        return
    refused = [name for name in _OF_ALL if getattr(config, name) is not None]
    refused += [name for name, values in _TOGETHER.items() if getattr(config, name) in values]
    for name in refused[:1]:
        raise ConfigError(
            f"staleness is {value!r}, with which each rank's push is an update by itself, and"
            f" {name} is {getattr(config, name)!r}, which is for ranks in the same step:"
            f" {_INSTEAD.get(name, 'leave out one of them')}"
        )


_NOT_LATE = {
    "architecture": ("ring", "hybrid", "auto"),
    "update": ("workers",),
    "slice_elems": ("auto",),
    "reply": ("pull",),
    "check_stale": (True,),
}


def _check_late(config: Config) -> None:
    """What a parameter cannot have whose answers land beside it."""
    refused = [name for name, values in _NOT_LATE.items() if getattr(config, name) in values]
    few = ("rebalance_s", "compression", "sparse_parameters")
    refused += [name for name in few if getattr(config, name) is not None]
    for name in refused[:1]:
        raise ConfigError(
            f"staleness is 'late', with which answers land beside the parameters, and {name} is"
            f" {getattr(config, name)!r}: {_INSTEAD.get(name, 'leave out one of them')}"
        )


def check_compression(config: Config) -> None:
    """Make the setting one text; raises `ConfigError` for what it does not go together with."""
    given = config.compression
    if isinstance(given, Mapping):
        object.__setattr__(config, "compression", _choices_text(given))
    text = config.compression
    if not isinstance(text, str):
        raise ConfigError(
            f"compression is {given!r}; it must be a codec's name, or codecs by patterns of"
            " parameters' names: {'*.weight': 'lossless'}" + answer_to_value("compression", given)
        )
    if is_automatic(text):
        _check_automatic_codecs(config, text)
    elif all(codec == NONE for _, codec in choices_of(text)):
        object.__setattr__(config, "compression", None)
        return
    if config.architecture in ("ring", "hybrid", "auto"):
        _take_ring_codecs(config, text)
        return
    if config.check_stale:
        raise ConfigError(
            f"compression is {text!r}, and check_stale is on, which overwrites the values that"
            " differences are added to; leave compression out while you look for readers"
        )


def _take_ring_codecs(config: Config, text: str) -> None:
    """A cast of everything is the wire's type. Raises `ConfigError` for what cannot be added up."""
    choices = () if is_automatic(text) else choices_of(text)
    everything = choices[0][1] if len(choices) == 1 and choices[0][0] == "*" else ""
    wire_dtype = _WIRE_DTYPES.get(everything)
    if wire_dtype is not None:
        if config.wire_dtype not in (None, wire_dtype):
            raise ConfigError(
                f"compression is {text!r} and wire_dtype is {config.wire_dtype!r}; with"
                f" architecture={config.architecture!r} the first means the second: leave one of"
                " them out"
            )
        object.__setattr__(config, "wire_dtype", wire_dtype)
        object.__setattr__(config, "compression", None)
        return
    kinds = {kind_of(codec) for _, codec in choices}
    if config.architecture == "auto":
        raise ConfigError(
            f"compression is {text!r} and architecture is 'auto', which may become a ring or"
            " servers; they share bf16 and fp16 for all parameters only. Choose 'p2p', 'ps', 'ring'"
            " or 'hybrid' for other codecs"
        )
    if not choices or not kinds <= _RING_CODECS[str(config.architecture)]:
        rows = "; of a table's rows lossless" if config.architecture == "hybrid" else ""
        raise ConfigError(
            f"compression is {text!r} and architecture is {config.architecture!r}, whose"
            " collectives add up codes on their way: that takes bf16 or fp16 for all parameters, or"
            f" randomk, whose elements all ranks draw alike{rows}. For other codecs use"
            " architecture='p2p' or 'ps'"
        )


def _check_automatic_codecs(config: Config, text: str) -> None:
    from foreprop.core.codecfacts import allowed_by

    allowed_by(text)
    if config.wire_dtype is not None:
        raise ConfigError(
            f"compression is {text!r}, which chooses codecs for float32, and wire_dtype is"
            f" {config.wire_dtype!r}; leave one of them out"
        )


def _choices_text(choices: Mapping[Any, Any]) -> str:
    """By patterns, as in the environment."""
    for pattern, codec in choices.items():
        known = isinstance(pattern, str) and isinstance(codec, str)
        if not known or set(f"{pattern}{codec}") & set(",="):
            raise ConfigError(
                f"compression has {pattern!r}: {codec!r}; both must be text without , and ="
            )
    return choices_text(choices.items())


def _check_architecture(config: Config) -> None:
    """Raises `ConfigError` for what does not go together with the architecture or lanes; ports."""
    if config.port_range is not None:
        parse_port_range(config.port_range)
    if config.encryption is not None:
        _check_encryption(config)
    if config.lanes == "one" and config.order != "priority":
        raise ConfigError(
            f"lanes is 'one' and order is {config.order!r}; one lane goes by priority: set"
            " order='priority', or leave lanes out"
        )
    if config.slice_elems == "auto":
        _check_automatic_slices(config)
    if config.architecture == "ps" and not config.dedicated_servers:
        raise ConfigError("architecture is 'ps'; set dedicated_servers to their number")
    if config.architecture in ("p2p", "ring") and config.dedicated_servers:
        raise ConfigError(
            f"architecture is {config.architecture!r}, which has no dedicated_servers; there are"
            f" to be {config.dedicated_servers}"
        )
    if config.architecture == "ring" and config.local_aggregation == "on":
        raise ConfigError(
            "local_aggregation is 'on', which is for servers; architecture is 'ring', whose"
            " ranks are ordered by node, so that each gradient crosses a link about once anyway"
        )
    collective = config.architecture in ("ring", "hybrid", "auto")
    if collective and config.link_rate_bits_per_s is not None:
        raise ConfigError(
            "link_rate_bits_per_s paces foreprop's own connections; architecture="
            f"{config.architecture!r} uses torch.distributed's"
        )
    for name in ("node_rates", "late_nodes"):
        if getattr(config, name) is not None:
            _check_uneven_nodes(config, name)
    if config.rebalance_s is not None:
        _check_rebalancing(config)


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
    if config.architecture in ("ring", "hybrid", "auto"):
        raise ConfigError(
            f"encryption is {config.encryption!r}, which is for servers; with architecture="
            f"{config.architecture!r} torch's collectives send in the clear. Use 'p2p' or 'ps', or"
            " leave encryption out and put the machines into a VPN (docs/strangers.md)"
        )


def _check_rebalancing(config: Config) -> None:
    """Slices must be able to move to servers beside the workers, and links be seen as they are."""
    excluded = {
        "architecture": config.architecture in ("ps", "ring", "hybrid"),
        "dedicated_servers": config.dedicated_servers > 0,
        "placement": config.placement in UNEVEN_LEFT_OUT,
        "local_aggregation": config.local_aggregation == "on",
        "link_rate_bits_per_s": config.link_rate_bits_per_s is not None,
        "wire_dtype": config.wire_dtype is not None,
        "compression": config.compression is not None,
    }
    for name, is_excluded in excluded.items():
        if is_excluded:
            raise ConfigError(
                f"rebalance_s is {config.rebalance_s:g}, which moves slices between servers beside"
                f" the workers; that does not go with {name}={getattr(config, name)!r}; leave out"
                " one of them"
            )


def _check_uneven_nodes(config: Config, name: str) -> None:
    from foreprop.core.linkshares import parse_late_nodes, parse_node_rates

    value = getattr(config, name)
    parse_node_rates(value) if name == "node_rates" else parse_late_nodes(value)
    if config.dedicated_servers or config.placement in UNEVEN_LEFT_OUT:
        raise ConfigError(
            f"{name} is {value!r}, which is for servers beside the workers that own what suits"
            f" their nodes; dedicated_servers is {config.dedicated_servers}, placement"
            f" {config.placement!r}"
        )


def _check_automatic_slices(config: Config) -> None:
    if config.architecture in ("ring", "hybrid") or config.granularity != "slice":
        raise ConfigError(
            f"slice_elems is 'auto', and with architecture={config.architecture!r}, granularity="
            f"{config.granularity!r} there are no slices to choose for; leave it out"
        )
    if config.dedicated_servers:
        raise ConfigError(
            "slice_elems is 'auto', which is for servers beside the workers; with"
            f" dedicated_servers={config.dedicated_servers} give a number"
        )


# Names that nobody knows.
def unknown_setting(name: str, known: Collection[str]) -> ConfigError:
    """``known``: the names of all settings."""
    return ConfigError(f"no setting is called {name!r}{_advice(name, known) or _ALL}")


_ALL = "; `foreprop config --all` lists them"


def _advice(name: str, known: Collection[str]) -> str:
    return answer_to_name(name) or did_you_mean(name, known)


def unknown_preset(name: str, presets: Collection[str]) -> ConfigError:
    advice = answer_to_value("preset", name) or did_you_mean(name, presets)
    return ConfigError(f"preset is {name!r}; it must be one of {list(presets)}{advice}")


def with_advice(error: TypeError, given: Collection[str], known: Collection[str]) -> TypeError:
    """Python's error about an unknown argument, with the setting that is close (as 3.14 has)."""
    unknown = next((name for name in given if name not in known), None)
    advice = "" if unknown is None else _advice(unknown, known)
    return TypeError(str(error).partition(". Did you mean")[0] + advice) if advice else error
