"""Which way a parameter's gradient should go: Parallax's Table 3."""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes that each worker sends or receives in a step, by the way of synchronisation."""

    servers: float
    """Rows pushed to servers and pulled from them."""
    all_gather: float
    """Everybody's rows to everybody."""
    all_reduce: float
    """As if it were dense."""


def traffic(size_bytes: int, alpha: float, workers: int) -> Traffic:
    """Parallax, Table 3: W = ``size_bytes``, of whose rows a worker touches a share ``alpha``.

    The last row is that of a ring, 2 (N-1)/N W, with N = ``workers``.
    """
    others = workers - 1
    return Traffic(
        servers=2 * alpha * size_bytes,
        all_gather=2 * others * alpha * size_bytes,
        all_reduce=2 * others / workers * size_bytes,
    )


def prefers_servers(alpha: float, workers: int) -> bool:
    """Whether servers move fewer bytes than all-reduce."""
    moved = traffic(1, alpha, workers)
    return moved.servers < moved.all_reduce
