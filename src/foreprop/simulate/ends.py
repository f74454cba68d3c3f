"""Who is at the ends of the connections between two processes, and how these are joined."""

from __future__ import annotations

from typing import NamedTuple

from foreprop.simulate.cluster import Cluster
from foreprop.simulate.connection import Connection, Deliver, Loopback, Sent
from foreprop.simulate.served import Outlet
from foreprop.workload.hosts import Kernel

Kernels = tuple[Kernel, Kernel]
"""Of pushes and of replies."""


class End(NamedTuple):
    """Of two connections, one in each direction."""

    node: int
    """A worker's or relay's as it is simulated, the number of its crowd; a server's own."""
    peer: int
    """What who is at the other end is called here."""
    outlet: Outlet
    receive: Deliver


class Way(NamedTuple):
    """One direction: who is at its end, and what is told to whom."""

    peer: int
    sent: Sent
    deliver: Deliver
    kernel: Kernel


Ways = tuple[Connection | Loopback, Connection | Loopback]
"""Forth and back."""


def ways_between(here: End, there: End, kernels: Kernels) -> tuple[Way, Way]:
    """Who pushes is ``here``, who replies ``there``."""
    pushes, replies = kernels
    return (
        Way(here.peer, here.outlet.taken, there.receive, pushes),
        Way(there.peer, there.outlet.taken, here.receive, replies),
    )


def connect_nodes(cluster: Cluster, here: End, there: End, kernels: Kernels) -> Ways:
    """Over the links of both nodes, or within one; no node stands for others."""
    ways = zip(ways_between(here, there, kernels), ((here, there), (there, here)), strict=True)
    forth, back = (
        cluster.connect(
            one.node, other.node, way.kernel, peer=way.peer, sent=way.sent, deliver=way.deliver
        )
        for way, (one, other) in ways
    )
    return forth, back


def join(here: End, there: End, ways: Ways) -> None:
    """Let both ends send over these, and each way carry the other one's acknowledgements."""
    forth, back = ways
    if isinstance(forth, Connection) and isinstance(back, Connection):
        forth.reverse, back.reverse = back, forth
    here.outlet.connections[here.peer] = forth
    there.outlet.connections[there.peer] = back
