"""Where ``slice_elems="auto"`` makes sense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.config.settings import Config


def check_automatic_slices(config: Config) -> None:
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
