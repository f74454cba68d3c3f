"""Who owns how much, where some nodes' links are slower than the others'.

A node's link carries what its worker pushes to the others' servers, and what its own server
answers to the others' workers. Of a model of W bytes on N nodes, if its server owns S bytes, that
is W - S and (N - 1) S: W + (N - 2) S in all, each way. So a slow link has the less to carry the
less its server owns, down to W if it owns nothing.

A node that computes for longer is another matter. Its gradients are the last ones of each slice, so
what all wait for leaves its link: these gradients, and its own server's answers to them. The other
links have time to spare meanwhile. So its server owns half of what it would (`spare`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from foreprop.errors import ConfigError

WHOLE = 10_000
"""Shares are parts of this, so that all processes reckon with the same whole numbers."""
_LATE = 1.15
"""Of the median node's compute: nodes that compute for so long are late."""
_LEAST_STEP, _MOST_BUSY = 1.05, 0.95
"""A step, of the slowest node's compute; and the fullest link, of a step: see `late_nodes_of`."""
_SPARED = 0.5
"""Of its share, what a late node's server owns."""
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


def parse_late_nodes(text: str) -> tuple[int, ...]:
    """Of ``3,5``; raises `ConfigError`."""
    nodes = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) in nodes:
            raise ConfigError(
                f"late_nodes has {part!r}; it must be numbers of nodes, as 3,5, and each node once"
            )
        nodes.append(int(part))
    return tuple(nodes)


def plan_shares(
    text: str | None, *, servers: int, per_node: int, late: str | None = None
) -> tuple[int, ...]:
    """By server, of the nodes' rates and the late nodes as settings have them; empty if all are to
    own as much. Raises `ConfigError`.
    """
    nodes = servers // per_node
    late_nodes = () if late is None else parse_late_nodes(late)
    for node in late_nodes:
        if node >= nodes:
            raise ConfigError(f"late_nodes has node {node}; there are 0 to {nodes - 1}")
    shares = spare(shares_of(rates_on(nodes, text)), late_nodes)
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


def late_nodes_of(
    compute_s: Sequence[float], rates: Sequence[float], *, model_s: float, step_s: float
) -> tuple[int, ...]:
    """Who computes for longer than the median node, if their servers should own less.

    By node: seconds of compute, and links' rates, of the fastest one's. ``model_s``: how long that
    one takes for the whole model; ``step_s``: a step with shares that suit the links. There is
    something to gain only where a step is longer than the slowest node's compute, and nothing where
    the other links, with more to carry, would then be busy for all of it.
    """
    usual_s = sorted(compute_s)[(len(compute_s) - 1) // 2]
    late = [node for node, own_s in enumerate(compute_s) if own_s >= _LATE * usual_s > 0]
    if not late or len(rates) <= 2 or step_s < _LEAST_STEP * max(compute_s):
        return ()
    busy_s = model_s * ready_in(rates, spare(shares_of(rates), late))
    return tuple(late) if busy_s <= _MOST_BUSY * step_s else ()


def spare(shares: Sequence[int], late: Collection[int]) -> list[int]:
    """By node, of `WHOLE`: late ones own half as much, and the others the rest, as before.

    Of two nodes each link carries the model once, whatever they own: these stay as they are.
    """
    nodes = range(len(shares))
    kept = [round(_SPARED * shares[node]) if node in late else 0 for node in nodes]
    others = sum(shares[node] for node in nodes if node not in late)
    if len(shares) <= 2 or not others:
        return list(shares)
    rest = sum(shares) - sum(kept)
    return [kept[node] if node in late else round(rest * shares[node] / others) for node in nodes]


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
