"""What a number of workers must be like where servers may count some pushes only."""

from __future__ import annotations

from foreprop.config import Config
from foreprop.errors import ConfigError


def check_fitness(config: Config, world_size: int) -> None:
    """Raises `ConfigError` for too few workers, or too many."""
    if config.max_workers is not None and config.max_workers < world_size:
        raise ConfigError(
            f"max_workers is {config.max_workers}, and there are {world_size} workers at the start:"
            " give at least as many, or leave it out"
        )
    if config.backup_workers >= world_size > 0:
        raise ConfigError(
            f"backup_workers is {config.backup_workers}, and must be below the number of workers,"
            f" {world_size}: somebody has to count"
        )
