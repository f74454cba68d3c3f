"""Who owns how much, where some nodes' links are slower than the others'.

A node's link carries what its worker pushes to the others' servers, and what its own server
answers to the others' workers. Of a model of W bytes on N nodes, if its server owns S bytes, that
is W - S and (N - 1) S: W + (N - 2) S in all, each way. So a slow link has the less to carry the
less its server owns, down to W if it owns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreprop.errors import ConfigError

WHOLE = 10_000
"""Shares are parts of this, so that all processes reckon with the same whole numbers."""
_ROUNDS = 90
"""Of bisection: more exact than shares are."""


def parse_node_rates(text: str) -> dict[int, float]:
    """Of ``3:0.5,2:0.8``, by node; raises `ConfigError`."""
    rates: dict[int, float] = {}
    for part in text.split(","):
        node, _, value = part.partition(":")
        try:
            number, rate = int(node), float(value)
        except ValueError:
            number, rate = -1, 0.0
        if number < 0 or number in rates or not 0 < rate < math.inf:
            raise ConfigError(
                f"node_rates has {part!r}; it must be NODE:SHARE, as 3:0.5, with a share above 0,"
                " and each node once"
            )
        rates[number] = rate
    return rates


def rates_on(nodes: int, text: str | None) -> list[float]:
    """By node, of the rates as a setting has them: 1 of who is not named; raises `ConfigError`."""
    given = {} if text is None else parse_node_rates(text)
    for node in given:
        if node >= nodes:
            raise ConfigError(f"node_rates has node {node}; there are 0 to {nodes - 1}")
    return [given.get(node, 1.0) for node in range(nodes)]


def as_setting(rates: Sequence[float]) -> str | None:
    """What `rates_on` reads as these rates, by node; None if all are 1 or more."""
    slower = [f"{node}:{rate:g}" for node, rate in enumerate(rates) if rate < 1]
    return ",".join(slower) or None


def plan_shares(text: str, *, servers: int, per_node: int) -> tuple[int, ...]:
    """By server, of the nodes' rates as a setting has them; empty if all are to own as much."""
    shares = shares_of(rates_on(servers // per_node, text))
    if len(set(shares)) == 1:
        return ()
    return tuple(share for share in shares for _ in range(per_node))


def shares_of(rates: Sequence[float]) -> list[int]:
    """By node, with which the slowest link is ready first; of `WHOLE`, at least one not 0.

    Two nodes own as much, whatever their links: then it makes no difference to them.
    """
    nodes = len(rates)
    if nodes <= 2 or len(set(rates)) == 1:
        return [WHOLE // nodes] * nodes

    def owned(time: float) -> list[float]:
        """Of the model, what each could own if links are to be ready by then."""
        return [max(0.0, (time * rate - 1) / (nodes - 2)) for rate in rates]

    least, most = 0.0, 1e9 / min(rates)
    for _ in range(_ROUNDS):
        time = (least + most) / 2
        least, most = (time, most) if sum(owned(time)) < 1 else (least, time)
    time = max(most, 1 / min(rates))  # what the slowest link's worker pushes, it has to
    could = owned(time)
    # with time to spare the fast ones share it as their links allow
    return [round(WHOLE * each / sum(could)) for each in could]


def ready_in(rates: Sequence[float], shares: Sequence[float]) -> float:
    """How long the slowest link takes for a whole model, if one of rate 1 carries one in 1."""
    nodes, whole = len(rates), sum(shares)
    return max(
        (1 + (nodes - 2) * share / whole) / rate for rate, share in zip(rates, shares, strict=True)
    )


def deal(sizes_bytes: Sequence[int], shares: Sequence[int]) -> list[int]:
    """By piece, its server: each to the one that is then least ahead of its share, the first of
    equal ones."""
    loads = [0] * len(shares)
    able = [server for server, share in enumerate(shares) if share > 0]
    chosen = []
    for size_bytes in sizes_bytes:
        server = min(able, key=lambda each: ((loads[each] + size_bytes) / shares[each], each))
        loads[server] += size_bytes
        chosen.append(server)
    return chosen
