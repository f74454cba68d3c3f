"""The world of a worker that joins a session that runs: nobody is met, not even in the store."""

from __future__ import annotations

import functools

from torch.distributed import HashStore  # type: ignore[attr-defined]

from foreprop.cluster.world import World
from foreprop.config import launch_info
from foreprop.config.joinaddress import parse_addresses
from foreprop.errors import ConfigError


@functools.cache
def newcomers_world(join: str) -> World:
    """Of the worker that it is to be, the same for one ``join``.

    Raises `ConfigError` if nothing says which.
    """
    info = launch_info()
    if not info.launched:
        raise ConfigError(
            f"join is {join!r}, and RANK or WORLD_SIZE is not set: set RANK to that of the worker"
            " that was lost, or to a new one, and WORLD_SIZE to how many there were at the start"
        )
    if info.rank < 0 or info.world_size < 1:
        raise ConfigError(
            f"RANK is {info.rank} and WORLD_SIZE {info.world_size}: ranks count from 0, and there"
            " was a worker at the start"
        )
    store = HashStore()
    return World(  # one on its machine, where nothing says how many (LOCAL_WORLD_SIZE)
        rank=info.rank,
        size=info.world_size,
        local_size=info.local_world_size if info.local_world_size < info.world_size else 1,
        host=parse_addresses(join)[0][0],
        store=store,
        raw_store=store,
    )
