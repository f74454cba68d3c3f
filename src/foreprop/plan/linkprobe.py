"""The links between the nodes of a session, measured while nothing else is sent.

One process on each node measures, all at about the same time, and they exchange what they have
found on a board. Every node sends to the next one, in a ring, so each link is full both ways, as in
training. A `TransportError` says that one of the nodes could not measure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from foreprop.config import Config
from foreprop.core.authentication import token_of
from foreprop.engine.rendezvous import Board, decode_entry
from foreprop.engine.secret import load_key
from foreprop.engine.stream import listen
from foreprop.engine.traffic import Endpoint, Flow, ProbeListener, ping, send
from foreprop.errors import TransportError
from foreprop.plan.deployment import ACKNOWLEDGED
from foreprop.plan.limit import HEADER_FACTOR

_STREAMS = 2  # at once to the next node: one alone may be held up by a single processor
_PING_S, _SETTLE_S, _SEND_S = 0.2, 0.2, 0.6
_BRIEF_SETTLE_S, _BRIEF_SEND_S, _BRIEF_TIMES = 0.06, 0.12, 3
_TOKEN_BYTES = 16
SAME = 0.85
"""The share of the fastest link's rate that links may be measured at although they are alike."""


@dataclass(frozen=True, slots=True)
class Links:
    """The rate of a session's slowest link, and how long a message takes to another node.

    The rate is each way, both ways at once, with headers and acknowledgements. ``node_rates`` are
    shares of the fastest node's; a node with `SAME` or more counts as as fast.
    """

    rate_bits_per_s: float
    latency_s: float
    node_rates: tuple[float, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """One node's rates of payload, as the receivers have counted it, and a message's round trip.

    ``sent_bits_per_s`` is to the next node. ``sent_back_bits_per_s`` is to the node before, which
    is None where there are two nodes.
    """

    sent_bits_per_s: float
    round_trip_s: float
    error: str | None = None
    sent_back_bits_per_s: float | None = None


def exchange_reports(
    board: Board,
    *,
    node: int,
    nodes: int,
    address: str,
    session: str,
    config: Config | None = None,
) -> list[Report]:
    """Measure for about a second; returns all nodes' reports.

    After the ring all nodes send to the node before: what is slow both times is a node's own link.
    """
    config = config or Config()
    token = _token(session, config.secret_file)
    listener = ProbeListener(listen(address, config.port_range), node, token)
    try:
        peer = _meet_next(board, listener, node, nodes, address)
        trip = ping(node, peer, token, _PING_S)
        board.publish(f"pinged/{node}", "")
        for other in range(nodes):
            board.lookup(f"pinged/{other}", f"node {other} to measure its links")
        flows, back = _send(node, peer, token), list[Flow]()
        if nodes > 2:
            board.publish(f"sent/{node}", "")
            for other in range(nodes):
                board.lookup(f"sent/{other}", f"node {other} to measure its links")
            back = _send(node, _address_of(board, (node - 1) % nodes), token)
        errors = [trip.error, *(flow.error for flow in flows + back)]
        report = Report(
            sent_bits_per_s=sum(flow.bits_per_s for flow in flows),
            round_trip_s=trip.median_s,
            error=next(filter(None, errors), None),
            sent_back_bits_per_s=sum(flow.bits_per_s for flow in back) if back else None,
        )
        return _exchange(board, node, nodes, report)
    finally:
        listener.close()


def _meet_next(
    board: Board, listener: ProbeListener, node: int, nodes: int, address: str
) -> Endpoint:
    """Publish where this node listens; returns where the next one does."""
    here = Endpoint(host=node, address=address, port=listener.port)
    board.publish(f"address/{node}", msgspec.json.encode(here).decode())
    return _address_of(board, (node + 1) % nodes)


def _address_of(board: Board, node: int) -> Endpoint:
    what = f"node {node}'s address"
    there: Endpoint = decode_entry(board.lookup(f"address/{node}", what), Endpoint, what)
    return there


def _exchange(board: Board, node: int, nodes: int, report: Report) -> list[Report]:
    board.publish(f"report/{node}", msgspec.json.encode(report).decode())
    texts = [
        board.lookup(f"report/{other}", f"node {other}'s measurement of its links")
        for other in range(nodes)
    ]
    return [decode_entry(text, Report, "a node's measurement of its links") for text in texts]


def _token(session: str, secret_file: str | None) -> bytes:
    """What a connection must begin with; if there is a secret, nobody without it knows that."""
    if secret_file is None:
        return session.encode()[:_TOKEN_BYTES].ljust(_TOKEN_BYTES, b"\0")
    return token_of(load_key(secret_file), f"links of {session}", _TOKEN_BYTES)


def slowest_rate(
    board: Board, *, node: int, nodes: int, address: str, session: str, config: Config
) -> float:
    """The slowest rate of all links, bit/s, with headers, measured in little over half a second.

    The best of a node's three measurements counts: what starts up beside it makes some slow.
    """
    token = _token(session, config.secret_file)
    listener = ProbeListener(listen(address, config.port_range), node, token)
    try:
        peer = _meet_next(board, listener, node, nodes, address)
        best, error = 0.0, None
        for _ in range(_BRIEF_TIMES):
            flows = _send(node, peer, token, settle_s=_BRIEF_SETTLE_S, seconds=_BRIEF_SEND_S)
            best = max(best, sum(flow.bits_per_s for flow in flows))
            error = next(filter(None, (flow.error for flow in flows)), None)
            if error is not None:
                break
        report = Report(best, round_trip_s=0.0, error=error)
        reports = _exchange(board, node, nodes, report)
    finally:
        listener.close()
    return conclude(reports).rate_bits_per_s


def conclude(reports: Sequence[Report], *, paced_bits_per_s: float | None = None) -> Links:
    """What follows from all nodes' reports, where training sends ``paced_bits_per_s`` at most.

    Each step waits for the slowest link, so that one counts.
    """
    for node, report in enumerate(reports):
        if report.error is not None:
            raise TransportError(f"node {node} could not measure its links: {report.error}")
    flows = [report.sent_bits_per_s for report in reports]
    back = [rate for report in reports if (rate := report.sent_back_bits_per_s) is not None]
    slowest = min(flows + back)
    most = paced_bits_per_s or math.inf
    paced = [[min(rate, most) for rate in rates] for rates in (flows, back)]
    return Links(
        rate_bits_per_s=slowest * (HEADER_FACTOR + ACKNOWLEDGED),
        latency_s=statistics.median(report.round_trip_s for report in reports) / 2,
        node_rates=rates_of_nodes(*paced) if len(back) == len(flows) else (),
    )


def rates_of_nodes(forth: Sequence[float], back: Sequence[float]) -> tuple[float, ...]:
    """Each node's rate as a share of the fastest one's, from flows to the next node and ``back``.

    A flow is as fast as the slower of the two links' directions that it passes. So each direction
    of a link is at least as fast as the faster of its two flows; and a link counts as its slower
    direction, because each server's link carries as much both ways.
    """
    nodes = range(len(forth))
    up = [max(forth[node], back[node]) for node in nodes]
    down = [max(forth[node - 1], back[(node + 1) % len(back)]) for node in nodes]
    rates = [min(each) for each in zip(up, down, strict=True)]
    shares = [rate / max(rates) for rate in rates]
    return tuple(1.0 if share >= SAME else round(share, 2) for share in shares)


def _send(
    node: int,
    peer: Endpoint,
    token: bytes,
    *,
    settle_s: float = _SETTLE_S,
    seconds: float = _SEND_S,
) -> list[Flow]:
    def stream(_: int) -> Flow:
        return send(node, peer, token, settle_s=settle_s, seconds=seconds)

    with ThreadPoolExecutor(max_workers=_STREAMS) as pool:
        return list(pool.map(stream, range(_STREAMS)))
