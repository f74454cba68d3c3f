"""What a model, or a number of workers, must be like where servers may count some pushes only."""

from __future__ import annotations

from foreprop.config import Config
from foreprop.core.manifest import Manifest
from foreprop.errors import ConfigError


def check_fitness(config: Config, manifest: Manifest, workers_per_node: int) -> None:
    """Raises `ConfigError` for tables by rows, scalers and too few workers, with the way round."""
    if config.max_workers is not None and config.max_workers < manifest.world_size:
        raise ConfigError(
            f"max_workers is {config.max_workers}, and there are {manifest.world_size} workers at"
            " the start: give at least as many, or leave it out"
        )
    names = ("elastic", "backup_workers", "counted_replay")
    given = next(f"{each} is {value!r}" for each in names if (value := getattr(config, each)))
    for info in manifest.parameters:
        if info.rows:
            raise ConfigError(
                f"{given}, and {info.name} is a table that servers hold row by row, which all"
                " ranks update together: set dense_parameters to its name, or leave out the first"
            )
    if manifest.knobs.aggregation.skip_nonfinite:
        raise ConfigError(
            f"{given}, and a scaler was given, which leaves out steps of all ranks together: train"
            " in bfloat16, which needs none, or leave out the first"
        )
    if manifest.knobs.buddy_steps is not None and workers_per_node > 1:
        raise ConfigError(
            f"{given}, servers are beside the workers, and there are {workers_per_node} on a node:"
            " a node that dies has one worker. Use dedicated_servers"
        )
    if config.backup_workers >= manifest.world_size > 0:
        raise ConfigError(
            f"{given}, and must be below the number of workers, {manifest.world_size}: somebody has"
            " to count"
        )
