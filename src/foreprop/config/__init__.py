"""Settings, presets and the environment."""

from foreprop.config.environment import (
    LaunchInfo,
    child_environment,
    did_you_mean,
    environment_for_hosts,
    foreign_setting,
    launch_info,
    parse_setting,
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
    "PRESETS",
    "Architecture",
    "Collectives",
    "Config",
    "LaunchInfo",
    "LocalAggregation",
    "Preset",
    "child_environment",
    "did_you_mean",
    "environment_for_hosts",
    "foreign_setting",
    "launch_info",
    "parse_setting",
]
