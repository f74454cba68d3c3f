"""Which way a parameter's gradient should go: Parallax's Table 3, by the busiest link.

Links are full duplex, so bytes are counted one way, for each architecture alike. Parallax's table
adds what a worker sends to what it gets for servers (2 alpha W) and for an all-gather (2 (N-1)
alpha W), but not for an all-reduce (2 (N-1)/N W), so its rows cannot be compared as they stand.
"""

from __future__ import annotations

from typing import NamedTuple

ROW_NUMBER_BYTES = 8
"""The size of the row number that goes with each row that is pushed, pulled or gathered."""


class Topology(NamedTuple):
    """The nodes that exchange a table's rows.

    Without ``dedicated_servers`` there is one beside the workers of each node, with equal shares.
    With ``local_aggregation`` a node's workers send one push, which has each row once.
    """

    nodes: int
    workers_per_node: int = 1
    dedicated_servers: int = 0
    local_aggregation: bool = True

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def pushes_per_node(self) -> int:
        return 1 if self.local_aggregation else self.workers_per_node

    def pushed_share(self, alpha: float) -> float:
        """The share of a table's rows that each push has, where a worker touches a share ``alpha``.

        It is 1 - (1 - alpha)^L with L workers per node, if all rows are drawn with equal chances;
        several workers touch a frequent word more often than that.
        """
        return 1 - (1 - alpha) ** (self.workers_per_node if self.local_aggregation else 1)


class Traffic(NamedTuple):
    """Bytes that pass the busiest link in a step, each way, by the way of synchronisation.

    An ``all_reduce`` passes the whole table, as if it were dense.
    """

    servers: float
    all_gather: float
    all_reduce: float


def traffic(size_bytes: float, row_bytes: float, alpha: float, topology: Topology) -> Traffic:
    """The traffic of a table of W = ``size_bytes`` whose workers touch a share ``alpha`` each.

    There are N nodes, R workers, P pushes from each node, and a push has V bytes with its row
    numbers. A server beside each node's workers costs that node's link (N-1)/N P V of pushes and as
    much of replies; k dedicated ones cost the busier link max(1, N/k) P V. An all-gather passes
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
