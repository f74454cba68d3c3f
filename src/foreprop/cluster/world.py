"""Who else is there: rank, world size, node, and torch.distributed's store to meet in."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    rendezvous,
)

from foreprop.cluster.parting import Partings
from foreprop.cluster.storeclient import StoreCaller, StoreClient, unwrap
from foreprop.config import Config, LaunchInfo, launch_info
from foreprop.errors import TransportError


@dataclass(kw_only=True)
class World:
    """One process's view of its peers. ``in_process``: servers are threads, not processes."""

    rank: int
    size: int
    local_size: int
    host: str
    store: Store
    raw_store: Store
    in_process: bool = False
    sessions: int = 0
    loaders: int = 0
    partings: Partings = field(default_factory=Partings, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._caller = StoreCaller(self.raw_store, self.host)
        self.entries = StoreClient(self.store, self._caller)
        self.raw_entries = StoreClient(self.raw_store, self._caller)

    def limit_store(self, config: Config) -> None:
        """No call of the store takes longer than this session would wait for anything."""
        limits_s = (self._caller.limit_s, config.join_timeout_s, config.step_timeout_s)
        self._caller.limit_s = min(limits_s)

    def next_session(self) -> int:
        """The number of the session about to start; the same on all ranks by program order."""
        with self._lock:
            self.sessions += 1
            return self.sessions - 1

    def next_loader(self) -> int:
        """The number of the loader about to be sharded; the same on all ranks, likewise."""
        with self._lock:
            self.loaders += 1
            return self.loaders - 1


_current: World | None = None
_current_lock = threading.Lock()


def current_world(timeout_s: float | None = None) -> World:
    """This process's world: torchrun's, an existing process group's, or one of one.

    The first call waits for at most so long for the rendezvous; by default ``join_timeout_s``.
    """
    global _current  # noqa: PLW0603 - one rendezvous per process
    with _current_lock:
        if _current is None:
            _current = _meet(launch_info(), timeout_s or Config.resolve().join_timeout_s)
        return _current


def is_alone() -> bool:
    """Whether `current_world` is one of one; found out without meeting anybody."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return launch_info().world_size == 1


def solitary_world() -> World:
    """A world of one, in this process."""
    store = HashStore()
    return World(
        rank=0,
        size=1,
        local_size=1,
        host="127.0.0.1",
        store=store,
        raw_store=store,
        in_process=True,
    )


def _meet(info: LaunchInfo, timeout_s: float) -> World:
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
    elif not info.launched:
        return solitary_world()
    else:
        try:
            timeout = timedelta(seconds=timeout_s)
            store, rank, size = next(rendezvous("env://", timeout=timeout))
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise TransportError(
                f"rank {info.rank} cannot reach the rendezvous at {info.master_address}:"
                f"{info.master_port} within {timeout_s:g} s (join_timeout_s): {error}"
            ) from error
    return World(
        rank=rank,
        size=size,
        local_size=info.local_world_size if info.launched else size,
        host=info.master_address,
        store=PrefixStore(f"foreprop/{info.attempt}", store),  # torchrun's restarts start anew
        raw_store=unwrap(store),
    )
