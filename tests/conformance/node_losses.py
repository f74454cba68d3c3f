"""Nodes of a session in threads, and how one of them is lost."""

from __future__ import annotations

from typing import Any

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
