"""The links between the nodes of a session, measured while nothing else is sent."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from foreprop.cluster.entries import decode_entry
from foreprop.cluster.rendezvous import Board
from foreprop.config import Config
from foreprop.errors import TransportError
from foreprop.link.stream import listen
from foreprop.link.traffic import Endpoint, Flow, ProbeListener, ping, send
from foreprop.model.deployment import ACKNOWLEDGED
from foreprop.workload.limit import HEADER_FACTOR

_STREAMS = 2
"""At once to the next node: one alone may be held up by a single processor."""
_PING_S, _SETTLE_S, _SEND_S = 0.2, 0.2, 0.6
_BRIEF_SETTLE_S, _BRIEF_SEND_S, _BRIEF_TIMES = 0.06, 0.12, 3
_TOKEN_BYTES = 16
SAME = 0.85
"""Links that are measured at the same time differ by so much although they are alike."""


@dataclass(frozen=True, slots=True)
class Links:
    """What the slowest link of a session carries, and how long a message takes."""

    rate_bits_per_s: float
    """Each way, both at once, with headers and acknowledgements."""
    latency_s: float
    """From one node to another."""
    node_rates: tuple[float, ...] = ()
    """By node, of the fastest one's; `SAME` and more count as as fast."""


class Report(msgspec.Struct, frozen=True):
    """One node's way to the next: payload as that one counted it, a message there and back."""

    sent_bits_per_s: float
    round_trip_s: float
    error: str | None = None
    sent_back_bits_per_s: float | None = None
    """To the node before, measured by itself; None of two nodes."""


def exchange_reports(
    board: Board,
    *,
    node: int,
    nodes: int,
    address: str,
    session: str,
    config: Config | None = None,
) -> list[Report]:
    """All nodes' measurements. Called by one process on each node at about the same time; takes
    about a second.

    Every node sends to the next one, in a ring, so each link is full both ways, as in training.
    Then all send to the node before: what is slow both times is that node's link.
    """
    config = config or Config()
    token = _token(session, config.secret_file)
    listener = ProbeListener(listen(address, config.port_range), node, token)
    try:
        peer = _introduce(board, listener, node, nodes, address)
        trip = ping(node, peer, token, _PING_S)
        board.publish(f"pinged/{node}", "")
        for other in range(nodes):
            board.lookup(f"pinged/{other}", f"node {other} to measure its links")
        flows, back = _send(node, peer, token), None
        if nodes > 2:
            back = _send_back(board, node, nodes, token)
        report = Report(
            sent_bits_per_s=sum(flow.bits_per_s for flow in flows),
            round_trip_s=trip.median_s,
            error=next(
                filter(None, (trip.error, *(flow.error for flow in flows + (back or [])))), None
            ),
            sent_back_bits_per_s=None if back is None else sum(flow.bits_per_s for flow in back),
        )
        return _tell(board, node, nodes, report)
    finally:
        listener.close()


def _introduce(
    board: Board, listener: ProbeListener, node: int, nodes: int, address: str
) -> Endpoint:
    """Say where this node listens; returns where the next one does."""
    here = Endpoint(host=node, address=address, port=listener.port)
    board.publish(f"address/{node}", msgspec.json.encode(here).decode())
    next_node = (node + 1) % nodes
    there = board.lookup(f"address/{next_node}", f"node {next_node}'s address")
    peer: Endpoint = decode_entry(there, Endpoint, f"node {next_node}'s address")
    return peer


def _tell(board: Board, node: int, nodes: int, report: Report) -> list[Report]:
    """This node's report; returns all nodes'."""
    board.publish(f"report/{node}", msgspec.json.encode(report).decode())
    told = [
        board.lookup(f"report/{other}", f"node {other}'s measurement of its links")
        for other in range(nodes)
    ]
    return [decode_entry(text, Report, "a node's measurement of its links") for text in told]


def _token(session: str, secret_file: str | None) -> bytes:
    """What a connection must begin with: with a secret, what only who has that can know."""
    if secret_file is None:
        return session.encode()[:_TOKEN_BYTES].ljust(_TOKEN_BYTES, b"\0")
    from foreprop.core.authentication import token_of
    from foreprop.link.secret import load_key

    return token_of(load_key(secret_file), f"links of {session}", _TOKEN_BYTES)


def slowest_rate(
    board: Board, *, node: int, nodes: int, address: str, session: str, config: Config
) -> float:
    """Of all links, bit/s, with headers, in a little more than half a second.

    Every node sends to the next one, in a ring, and its best of three counts: what starts up beside
    it makes some of them slow. Called as `exchange_reports` is. Raises `TransportError` if one of
    the nodes could not measure.
    """
    token = _token(session, config.secret_file)
    listener = ProbeListener(listen(address, config.port_range), node, token)
    try:
        peer = _introduce(board, listener, node, nodes, address)
        best, error = 0.0, None
        for _ in range(_BRIEF_TIMES):
            flows = _send(node, peer, token, settle_s=_BRIEF_SETTLE_S, seconds=_BRIEF_SEND_S)
            best = max(best, sum(flow.bits_per_s for flow in flows))
            error = next(filter(None, (flow.error for flow in flows)), None)
            if error is not None:
                break
        report = Report(best, round_trip_s=0.0, error=error)
        reports = _tell(board, node, nodes, report)
    finally:
        listener.close()
    return conclude(reports).rate_bits_per_s


def conclude(reports: Sequence[Report]) -> Links:
    """Of all nodes' reports. The slowest link counts, because each step waits for it.

    Raises `TransportError` if one of them could not measure.
    """
    for node, report in enumerate(reports):
        if report.error is not None:
            raise TransportError(f"node {node} could not measure its links: {report.error}")
    flows = [report.sent_bits_per_s for report in reports]
    back = [rate for report in reports if (rate := report.sent_back_bits_per_s) is not None]
    slowest = min(flows + back)
    return Links(
        rate_bits_per_s=slowest * (HEADER_FACTOR + ACKNOWLEDGED),
        latency_s=statistics.median(report.round_trip_s for report in reports) / 2,
        node_rates=rates_of_nodes(flows, back) if len(back) == len(flows) else (),
    )


def rates_of_nodes(forth: Sequence[float], back: Sequence[float]) -> tuple[float, ...]:
    """By node, of the fastest one's: of flows from every node to the next, and to the one before.

    A flow is as fast as the slower one of the two directions that it passes. So each direction of
    a link is at least as fast as the faster one of its two flows; and a link counts as its slower
    direction, because each server's link carries as much both ways.
    """
    nodes = range(len(forth))
    up = [max(forth[node], back[node]) for node in nodes]
    down = [max(forth[node - 1], back[(node + 1) % len(back)]) for node in nodes]
    rates = [min(each) for each in zip(up, down, strict=True)]
    shares = [rate / max(rates) for rate in rates]
    return tuple(1.0 if share >= SAME else round(share, 2) for share in shares)


def _send_back(board: Board, node: int, nodes: int, token: bytes) -> list[Flow]:
    """To the node before, when all have sent to the next one."""
    board.publish(f"sent/{node}", "")
    for other in range(nodes):
        board.lookup(f"sent/{other}", f"node {other} to measure its links")
    before = (node - 1) % nodes
    what = f"node {before}'s address"
    there: Endpoint = decode_entry(board.lookup(f"address/{before}", what), Endpoint, what)
    return _send(node, there, token)


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
