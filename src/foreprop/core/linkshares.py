"""What share of the model each server owns where some nodes are slower, and how large slices are.

A node's link carries what its worker pushes to the others' servers, and what its own server
answers to the others' workers. With a model of W bytes on N nodes, and S bytes at its own server,
these are W - S and (N - 1) S: W + (N - 2) S in all, each way. So a slow link has the less to carry
the less its server owns, down to W if it owns nothing.

Nodes that compute for longer, *late* ones, are another matter. Their gradients are the last of each
slice, so what all wait for leaves their links: these gradients, and their own servers' answers to
them. The other links have time to spare meanwhile. So a late node's server owns half of what it
would (`spare`).

Rates are relative to the fastest link's, which is 1. Shares are parts of `WHOLE`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from foreprop.core.lateness import Straggler
from foreprop.core.slicing import LEAST_SLICE_ELEMS, usual_slice_elems
from foreprop.errors import ConfigError

WHOLE = 10_000
"""What shares add up to: all processes reckon with the same whole numbers."""
_LATE = 1.15  # nodes that compute for so many times as long as the median node are late
_LEAST_STEP = 1.05  # of the slowest node's compute: a shorter step has nothing to gain
_MOST_BUSY = 0.95  # of a step: a link that is busy for longer has no time to spare
_SPARED = 0.5  # the part of its share that a late node's server owns
_ROUNDS = 90  # of bisection, which is then more exact than shares are
_SLICE_S = 0.7e-3  # that a slice of float32 takes on the link
_MOST_TIMES = 4  # slices on fast links are at most so many times as large as usual
_LEAST_EACH = 16  # slices are no larger than usual where a server would have fewer
_FLOAT_BITS = 32


def parse_node_rates(text: str) -> dict[int, float]:
    """The rates in ``3:0.5,2:0.8``, by node; raises `ConfigError`."""
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
    """Each node's rate by a setting, where those not named have 1; raises `ConfigError`."""
    given = {} if text is None else parse_node_rates(text)
    for node in given:
        if node >= nodes:
            raise ConfigError(f"node_rates has node {node}; there are 0 to {nodes - 1}")
    return [given.get(node, 1.0) for node in range(nodes)]


def as_setting(rates: Sequence[float]) -> str | None:
    """The setting that `rates_on` reads as these rates; None if all are 1 or more."""
    slower = [f"{node}:{rate:g}" for node, rate in enumerate(rates) if rate < 1]
    return ",".join(slower) or None


def parse_late_nodes(text: str) -> tuple[int, ...]:
    """The nodes in ``3,5``; raises `ConfigError`."""
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
    """The servers' shares by the settings of the nodes' rates and the late nodes.

    Empty if all are to own as much. Raises `ConfigError`.
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
    """Each node's share with which the last link is ready soonest; not all are 0."""
    nodes = len(rates)
    if nodes <= 2 or len(set(rates)) == 1:  # for two links shares make no difference
        return [WHOLE // nodes] * nodes

    def owned(time: float) -> list[float]:  # of the model, at most, by links ready at this time
        return [max(0.0, (time * rate - 1) / (nodes - 2)) for rate in rates]

    least, most = 0.0, 1e9 / min(rates)
    for _ in range(_ROUNDS):
        time = (least + most) / 2
        least, most = (time, most) if sum(owned(time)) < 1 else (least, time)
    time = max(most, 1 / min(rates))  # the slowest link has its own worker's pushes to carry
    could = owned(time)
    # with time to spare the fast links share the model as they could
    return [round(WHOLE * each / sum(could)) for each in could]


def late_nodes_of(
    compute_s: Sequence[float], rates: Sequence[float], *, model_s: float, step_s: float
) -> tuple[int, ...]:
    """The late nodes, if their servers should own less; else none.

    A link of rate 1 takes ``model_s`` for the whole model; a step takes ``step_s`` with shares that
    suit the links. There is something to gain only where a step is longer than the slowest node's
    compute, and nothing where the other links, with more to carry, would be busy for all of it.
    """
    usual_s = sorted(compute_s)[(len(compute_s) - 1) // 2]
    late = [node for node, own_s in enumerate(compute_s) if own_s >= _LATE * usual_s > 0]
    if not late or len(rates) <= 2 or step_s < _LEAST_STEP * max(compute_s):
        return ()
    busy_s = model_s * ready_in(rates, spare(shares_of(rates), late))
    return tuple(late) if busy_s <= _MOST_BUSY * step_s else ()


def spare(shares: Sequence[int], late: Collection[int]) -> list[int]:
    """Each node's share if late ones own half as much, and the others the rest."""
    nodes = range(len(shares))
    kept = [round(_SPARED * shares[node]) if node in late else 0 for node in nodes]
    others = sum(shares[node] for node in nodes if node not in late)
    if len(shares) <= 2 or not others:  # each of two links carries the model once, in any case
        return list(shares)
    rest = sum(shares) - sum(kept)
    return [kept[node] if node in late else round(rest * shares[node] / others) for node in nodes]


def ready_in(rates: Sequence[float], shares: Sequence[float]) -> float:
    """When the last link is ready with a step, where a link of rate 1 carries a model in 1."""
    nodes, whole = len(rates), sum(shares)
    return max(
        (1 + (nodes - 2) * share / whole) / rate for rate, share in zip(rates, shares, strict=True)
    )


def slice_elems_at(
    rate_bits_per_s: float, *, servers: int, elems: int, uneven: bool = False
) -> int:
    """What the slowest link carries in about 0.7 ms: 12,500 to 200,000 elements on up to 8 servers.

    A slice costs its hosts the same time on all links: small slices cost fast links more than they
    win, and large ones leave slow links idle (lab/docs/notebook/full-size.md). A model of few
    ``elems`` has no larger slices than usual if the ``servers`` had fewer than 16 each. ``uneven``
    is as for `usual_slice_elems`.
    """
    usual = usual_slice_elems(servers)
    most = min(usual * _MOST_TIMES, max(usual, elems // (servers * _LEAST_EACH)))
    wanted = rate_bits_per_s * _SLICE_S / _FLOAT_BITS / LEAST_SLICE_ELEMS
    suited = min(LEAST_SLICE_ELEMS << round(math.log2(max(wanted, 1.0))), most)
    return max(LEAST_SLICE_ELEMS, suited // 2 if uneven else suited)


# When links are measured again, and whether slices then move.
_WINDOWS = 4  # how many windows in a row must suspect the same link
_MOST_PAUSES = 16
_LEAST_GAIN = 0.05  # the least gain that slices move for, as a share of the slowest link's time


class LinkWatch:
    """Decides at rank 0, as long as the session lasts, when links are to be measured.

    ``pause_s`` is the least time between two measurements; ``uneven`` says that servers own unlike
    shares. Times are seconds of any one clock.
    """

    def __init__(self, *, pause_s: float, uneven: bool) -> None:
        self._first_pause_s = self._pause_s = pause_s
        self._uneven = uneven
        self._asked = False
        self._since_s: float | None = None  # the last measurement, or the first window
        self._rank: int | None = None
        self._seen = 0  # the rank's link, in so many windows in a row

    def observe(self, straggler: Straggler | None, now_s: float) -> bool:
        """Note the end of a window; returns whether links are to be measured."""
        rank = None
        if straggler is not None and straggler.cause == "link":
            rank = straggler.rank
        if rank is None or rank != self._rank:
            self._seen = 0
        self._seen += rank is not None
        self._rank = rank
        if self._since_s is None:
            self._since_s = now_s
        if self._asked or now_s - self._since_s < self._pause_s:
            return False
        self._asked = self._uneven or self._seen >= _WINDOWS
        return self._asked

    def measured(self, now_s: float, *, moved: bool, uneven: bool) -> None:
        """Note that links were measured, whether slices ``moved``, and how shares are now."""
        longer_s = min(2 * self._pause_s, _MOST_PAUSES * self._first_pause_s)
        self._pause_s = self._first_pause_s if moved else longer_s
        self._since_s, self._uneven = now_s, uneven
        self._asked, self._seen = False, 0


def is_worth_moving(rates: Sequence[float], shares: Sequence[int]) -> bool:
    """Whether the last link would be ready sooner, by `_LEAST_GAIN`, with shares for these rates.

    ``shares`` are the present ones by node: those of its servers together.
    """
    return ready_in(rates, shares) >= (1 + _LEAST_GAIN) * ready_in(rates, shares_of(rates))


def too_few(nodes: int) -> str:
    """Why nothing can move on one or two nodes, in words."""
    return f"of {nodes} {'node' if nodes == 1 else 'nodes'} no server can own what spares a link"


def describe_move(before: Sequence[float], rates: Sequence[float], *, step: int) -> list[str]:
    """A line for each node whose rate is not what it was ``before``; ``step`` is the first one."""
    shares = zip(shares_of(before), shares_of(rates), strict=True)
    return [
        f"from step {step} node {node}'s server owns {now / WHOLE:.0%} instead of"
        f" {was / WHOLE:.0%}: its link {_describe_rate(rates[node])}"
        for node, (was, now) in enumerate(shares)
        if rates[node] != before[node]
    ]


def describe_loads(
    before: Sequence[float], after: Sequence[float], rates: Mapping[int, float], *, step: int
) -> list[str]:
    """A line for each server whose load differs; ``rates`` are by server that is not lost."""
    return [
        f"from step {step} server {server} owns {now / sum(after):.0%} instead of"
        f" {was / sum(before):.0%}: its link {_describe_rate(rates[server])}"
        for server, (was, now) in enumerate(zip(before, after, strict=True))
        if was != now and server in rates
    ]


def _describe_rate(rate: float) -> str:
    return "is as fast as any" if rate >= 1 else f"has {rate:g} of the fastest one's rate"
