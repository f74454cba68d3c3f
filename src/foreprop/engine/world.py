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

from foreprop.config import LaunchInfo, launch_info
from foreprop.errors import StepTimeout, TransportError


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
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def next_session(self) -> int:
        """The number of the session about to start; the same on all ranks by program order."""
        with self._lock:
            self.sessions += 1
            return self.sessions - 1

    def publish(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def lookup(self, key: str, *, timeout_s: float, what: str, raw: bool = False) -> bytes:
        """A key's value, waiting for it; raises `StepTimeout` that says what is missing."""
        store = self.raw_store if raw else self.store
        try:
            store.wait([key], timedelta(seconds=timeout_s))
            return bytes(store.get(key))
        except (dist.DistStoreError, RuntimeError) as error:
            raise StepTimeout(
                f"rank {self.rank} waited {timeout_s:g} s (join_timeout_s) for {what}"
            ) from error


_current: World | None = None
_current_lock = threading.Lock()


def current_world() -> World:
    """This process's world: torchrun's, an existing process group's, or one of one."""
    global _current  # noqa: PLW0603 - one rendezvous per process
    with _current_lock:
        if _current is None:
            _current = _meet(launch_info())
        return _current


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


def _meet(info: LaunchInfo) -> World:
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
    elif not info.launched:
        return solitary_world()
    else:
        try:
            store, rank, size = next(rendezvous("env://"))
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise TransportError(
                f"rank {info.rank} cannot reach the rendezvous at {info.master_address}:"
                f"{info.master_port}: {error}"
            ) from error
    return World(
        rank=rank,
        size=size,
        local_size=info.local_world_size if info.launched else size,
        host=info.master_address,
        store=PrefixStore("foreprop", store),
        raw_store=_unwrap(store),
    )


def _unwrap(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
