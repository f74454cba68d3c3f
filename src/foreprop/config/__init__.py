"""Settings, presets and the environment."""

from foreprop.config.environment import (
    LaunchInfo,
    cache_directory,
    child_environment,
    environment_for_hosts,
    foreign_setting,
    launch_info,
)
from foreprop.config.settings import PRESETS, Config
from foreprop.config.typed import (
    Architecture,
    Collectives,
    LocalAggregation,
    Preset,
    Settings,
    SliceElems,
    UpdateBy,
    Wait,
    WholeTables,
)
from foreprop.config.values import did_you_mean, parse_setting

__all__ = [
    "PRESETS",
    "Architecture",
    "Collectives",
    "Config",
    "LaunchInfo",
    "LocalAggregation",
    "Preset",
    "Settings",
    "SliceElems",
    "UpdateBy",
    "Wait",
    "WholeTables",
    "cache_directory",
    "child_environment",
    "did_you_mean",
    "environment_for_hosts",
    "foreign_setting",
    "launch_info",
    "parse_setting",
]
