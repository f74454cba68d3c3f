"""Several workers as threads of one process: real sockets, servers and autograd, no start-up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from foreprop.engine.world import World

T = TypeVar("T")


def worlds(size: int, *, local_size: int = 1) -> list[World]:
    """Worlds of one cluster; by default every worker is a node of its own."""
    store = dist.HashStore()
    return [
        World(
            rank=rank,
            size=size,
            local_size=local_size,
            host="127.0.0.1",
            store=store,
            raw_store=store,
            in_process=True,
        )
        for rank in range(size)
    ]


def run_cluster(
    size: int, work: Callable[[World], T], *, local_size: int = 1, timeout_s: float = 60
) -> list[T]:
    """``work(world)`` in one thread per rank; the results by rank, or the first error by rank."""
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(world: World) -> None:
        try:
            results[world.rank] = work(world)
        except BaseException as error:
            errors[world.rank] = error

    threads = [
        threading.Thread(target=run, args=(world,), name=f"rank-{world.rank}")
        for world in worlds(size, local_size=local_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    alive = [thread.name for thread in threads if thread.is_alive()]
    if alive:
        # whom they wait for may have ended with an error
        first = next((error for error in errors if error is not None), None)
        raise TimeoutError(f"{alive} did not end within {timeout_s} s") from first
    for error in errors:
        if error is not None:
            raise error
    return results
