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
    cut_off(session)
    raise Died


def cut_off(session: Any) -> None:
    """The same, in any thread; the one that trains has an error, or waits.

    With a process its port goes at once, by which others know that it is dead.
    """
    backend = session._training.backends.all[0]
    for handle in backend.connections.handles:
        handle._server._done.set()  # whatever ends now, it does not care
        for peer in list(handle._server._peers.values()):
            peer.stream.close()  # before its log ends: nothing is answered that is not there
        handle._server.end()
        handle._thread.join(30)
    for connection in backend.engine.connections:
        connection.stream.close()
