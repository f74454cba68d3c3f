"""What few sessions set, checked: architectures, and the steps that are traced."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.config.settings import Config

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


def check_architecture(config: Config) -> None:
    """Raises `ConfigError` for what does not go together with the architecture."""
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


def _check_rebalancing(config: Config) -> None:
    """Slices must be able to move to servers beside the workers, and links be seen as they are."""
    excluded = {
        "architecture": config.architecture in ("ps", "ring", "hybrid"),
        "dedicated_servers": config.dedicated_servers > 0,
        "placement": config.placement == "kvstore",
        "local_aggregation": config.local_aggregation == "on",
        "link_rate_bits_per_s": config.link_rate_bits_per_s is not None,
        "wire_dtype": config.wire_dtype is not None,
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
    if config.dedicated_servers or config.placement == "kvstore":
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
