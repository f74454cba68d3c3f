"""Settings, presets and the environment."""

from foreprop.config.environment import (
    LOGGER,
    LaunchInfo,
    child_environment,
    launch_info,
)
from foreprop.config.settings import (
    PRESETS,
    Architecture,
    Collectives,
    Config,
    LocalAggregation,
    Preset,
)

__all__ = [
    "LOGGER",
    "PRESETS",
    "Architecture",
    "Collectives",
    "Config",
    "LaunchInfo",
    "LocalAggregation",
    "Preset",
    "child_environment",
    "launch_info",
]
