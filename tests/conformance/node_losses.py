"""Nodes of a session in threads: how one of them is lost, and who comes in its place."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from foreprop.cluster.world import World
from tests.conformance.counting_runs import Died

BESIDE: dict[str, Any] = {
    "elastic": True,
    "architecture": "p2p",
    "slice_elems": 10,
    "step_timeout_s": 20.0,
}


def lose_node(session: Any) -> None:
    """As if the machine were gone: worker and server end without a word."""
    backend = session._training.backends.all[0]
    for handle in backend.connections.handles:
        for substitute in handle._server._joining.work.recovery.substitutes:
            substitute.cancel()
        handle._server.cancel()
    for connection in backend.engine.connections:
        connection.stream.close()
    raise Died


def newcomers_world(rank: int, size: int) -> World:
    """With a store of its own: nobody else's is there any more."""
    store = dist.HashStore()
    about: dict[str, Any] = {"store": store, "raw_store": store, "in_process": True}
    return World(rank=rank, size=size, local_size=1, host="127.0.0.1", **about)
