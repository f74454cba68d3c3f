"""Which way a parameter's gradient should go: Parallax's Table 3, by the busiest link.

Links are full duplex, so bytes are counted one way, for each architecture alike. Parallax's table
adds what a worker sends and what it gets for servers (2 alpha W) and for an all-gather (2 (N-1)
alpha W), but not for an all-reduce (2 (N-1)/N W), so its rows cannot be compared as they stand.
"""

from __future__ import annotations

from typing import NamedTuple

ROW_NUMBER_BYTES = 8
"""With each row that is pushed, pulled or gathered."""


class Topology(NamedTuple):
    """Who exchanges a table's rows, and over which links."""

    nodes: int
    workers_per_node: int = 1
    dedicated_servers: int = 0
    """0: one beside the workers of each node, with equal shares."""
    local_aggregation: bool = True
    """A node's workers send one push, in which a row is once that several of them touch."""

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def pushes_per_node(self) -> int:
        return 1 if self.local_aggregation else self.workers_per_node

    def pushed_share(self, alpha: float) -> float:
        """Of a table's rows, how many each push has.

        Of rows drawn at random, with equal chances, 1 - (1 - alpha)^L with L workers per node.
        Frequent words are shared more often.
        """
        return 1 - (1 - alpha) ** (self.workers_per_node if self.local_aggregation else 1)


class Traffic(NamedTuple):
    """Bytes that pass the busiest link in a step, each way, by the way of synchronisation."""

    servers: float
    """Rows pushed to servers and pulled from them."""
    all_gather: float
    """Everybody's rows to everybody."""
    all_reduce: float
    """As if it were dense."""


def traffic(size_bytes: float, row_bytes: float, alpha: float, topology: Topology) -> Traffic:
    """W = ``size_bytes``, in rows of ``row_bytes``, of which a worker touches a share ``alpha``.

    With N nodes, R workers, P pushes from each node, and V the bytes of a push with its row
    numbers: a server beside each node's workers costs that node's link (N-1)/N P V of pushes and as
    much of replies, k dedicated ones cost the busier link max(1, N/k) P V. An all-gather passes
    (R-1) alpha W on, a ring ordered by node 2 (R-1)/R W. On one node processes count as its links.
    """
    nodes, ranks = topology.nodes, topology.workers
    numbered_bytes = size_bytes * (1 + ROW_NUMBER_BYTES / row_bytes)
    pushed_bytes = topology.pushes_per_node * topology.pushed_share(alpha) * numbered_bytes
    if topology.dedicated_servers:
        servers = max(1.0, nodes / topology.dedicated_servers) * pushed_bytes
    elif nodes == 1:  # all of them push to one process
        servers = ranks * alpha * numbered_bytes
    else:
        servers = 2 * (nodes - 1) / nodes * pushed_bytes
    return Traffic(
        servers=servers,
        all_gather=(ranks - 1) * alpha * numbered_bytes,
        all_reduce=2 * (ranks - 1) / ranks * size_bytes,
    )


def prefers_servers(row_bytes: float, alpha: float, topology: Topology) -> bool:
    """Whether servers keep the busiest link less busy than an all-reduce."""
    moved = traffic(1.0, row_bytes, alpha, topology)
    return moved.servers < moved.all_reduce
