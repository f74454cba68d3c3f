"""Settings that exclude each other: only looked at where some of them are set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.config.settings import Config


def check_architecture(config: Config) -> None:
    """Raise `ConfigError` for settings that exclude each other."""
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
    """Raise `ConfigError` where nothing is to be chosen."""
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
