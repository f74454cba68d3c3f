"""How long a step's bytes occupy links, by architecture: closed forms, without any overlap.

All links are full duplex and of one rate in both directions unless said otherwise; headers and
latency are left out (multiply the bytes by `foreprop.plan.limit.HEADER_FACTOR`). Of an
all-reduce, and of servers beside the workers: `foreprop.plan.limit.wire_s`. Of tables with
sparse gradients: `foreprop.core.parallax.traffic`.
"""

from __future__ import annotations

from foreprop.errors import ConfigError


def dedicated_s(
    size_bytes: float,
    *,
    workers: int,
    servers: int,
    rate_bits_per_s: float,
    server_rate_bits_per_s: float | None = None,
) -> float:
    """max(W / B, N W / (k B)): k servers on machines of their own, with equal shares.

    Pushes and replies pass in opposite directions, at best at the same time; a step without any
    overlap takes both, twice as long. ``server_rate_bits_per_s``: of the servers' links, if it is
    another one.
    """
    _check(workers=workers, servers=servers)
    server_rate = server_rate_bits_per_s or rate_bits_per_s
    return size_bytes * 8 * max(1 / rate_bits_per_s, workers / (servers * server_rate))


def mixed_s(
    size_bytes: float,
    *,
    workers: int,
    servers: int,
    rate_bits_per_s: float,
    dedicated_share: float | None = None,
) -> float:
    """Servers beside n workers and k dedicated ones, which together hold ``dedicated_share`` of W.

    A worker's link carries 1 + (n - 2) (1 - share) / n times W, a dedicated server's n share / k
    times. By default both take equally long, which is the optimum: 2 n (n - 1) / (n^2 + k n - 2 k)
    W / B (Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training in
    Heterogeneous GPU/CPU Clusters (BytePS), section 4.1). With share 0 it is the time of an
    all-reduce, with 1 that of `dedicated_s`.
    """
    if dedicated_share is None:
        dedicated_share = best_dedicated_share(workers, servers)
    if not 0 <= dedicated_share <= 1:
        raise ConfigError(f"dedicated_share is {dedicated_share}; it must be from 0 to 1")
    if dedicated_share and not servers:
        raise ConfigError(f"dedicated_share is {dedicated_share} with no dedicated servers")
    beside = (1 - dedicated_share) / workers  # share of W of each worker's server
    worker = (1 - beside) + (workers - 1) * beside  # its pushes, and that server's replies
    server = workers * dedicated_share / servers if servers else 0.0
    return size_bytes * 8 / rate_bits_per_s * max(worker, server)


def best_dedicated_share(workers: int, servers: int) -> float:
    """Of W, for k dedicated servers together, with the others beside the n workers; BytePS's.

    k 2 (n - 1) / (n^2 + k n - 2 k), and at most 1, which is reached with k = n. For one worker 0:
    its own server costs no link anything.
    """
    _check(workers=workers, servers=servers + 1)
    if workers == 1:
        return 0.0
    square = workers * workers + servers * workers - 2 * servers
    return min(1.0, 2 * servers * (workers - 1) / square)


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} is {count}; at least 1")
