"""What few sessions set, checked: architectures, ports, and the steps that are traced."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.config.settings import Config

_HIGHEST_PORT = 65_535
_RANGE = re.compile(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", re.ASCII)
_WINDOW = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


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


def check_architecture(config: Config) -> None:
    """Raises `ConfigError` for what does not go together with the architecture, and bad ports."""
    if config.port_range is not None:
        parse_port_range(config.port_range)
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
    if config.node_rates is not None:
        _check_node_rates(config)


def _check_node_rates(config: Config) -> None:
    from foreprop.core.linkshares import parse_node_rates

    parse_node_rates(config.node_rates or "")
    if config.dedicated_servers or config.placement == "kvstore":
        raise ConfigError(
            f"node_rates is {config.node_rates!r}, which is for servers beside the workers that"
            f" own what suits their links; dedicated_servers is {config.dedicated_servers},"
            f" placement {config.placement!r}"
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
