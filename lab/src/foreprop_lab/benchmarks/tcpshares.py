"""How evenly TCP connections share links when all begin at once: the lab's links, plain sockets.

python -m foreprop_lab.benchmarks.tcpshares --nodes 4 --rate 76.7Mbit --size 1.6MB \\
    --pauses 0,0.5,1,2

In a round every node sends as much to every other one, as servers do that are all asked at the
start of a step. Even shares would end all connections at once. For each pause before a round this
prints how much later than that the last one ends, and how much earlier the first.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from foreprop.plan.limit import HEADER_FACTOR
from foreprop.quantities import parse_rate
from foreprop.tools.cli.options import writable
from foreprop_lab.lab.cluster import Cluster
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.links import Network
from foreprop_lab.simulate.cluster import Cluster as SimulatedCluster
from foreprop_lab.simulate.cluster import lab_link
from foreprop_lab.simulate.connection import Way
from foreprop_lab.simulate.presets import SEND_BUFFER_BYTES
from foreprop_lab.simulate.setting import plan_crowds

_PORT = 29_500
_CHUNK_BYTES = 65_536
_LEAD_S = 0.01  # all nodes know by then when a round begins


class Rounds(NamedTuple):
    network: Network
    size_bytes: int


def work(rank: int, connection: Any, asked: Rounds) -> None:
    """Run a node: answer each start of a round with when each connection's bytes were in."""
    network, size_bytes = asked
    others = [node for node in range(network.nodes) if node != rank]
    connection.recv()
    listener = socket.create_server((network.address(rank), _PORT), backlog=len(others))
    connection.send(None)  # all listen before any connects
    connection.recv()
    outgoing = [socket.create_connection((network.address(node), _PORT)) for node in others]
    incoming = [listener.accept()[0] for _ in others]
    for each in (*outgoing, *incoming):
        each.setblocking(False)
    connection.send(None)
    while (starts_at := connection.recv()) is not None:
        time.sleep(max(0.0, starts_at - time.monotonic()))
        connection.send(_exchange(outgoing, incoming, size_bytes))


def _exchange(
    outgoing: Sequence[socket.socket], incoming: Sequence[socket.socket], size_bytes: int
) -> list[float]:
    """Seconds from the start until each connection's last byte was in."""
    started, ended = time.monotonic(), []
    data, buffer = bytes(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)
    left = dict.fromkeys((*outgoing, *incoming), size_bytes)
    with selectors.DefaultSelector() as selector:
        for each in outgoing:
            selector.register(each, selectors.EVENT_WRITE)
        for each in incoming:
            selector.register(each, selectors.EVENT_READ)
        while any(left.values()):
            for key, events in selector.select():
                end: Any = key.fileobj
                if events & selectors.EVENT_WRITE:
                    left[end] -= end.send(data[: left[end]])
                else:
                    left[end] -= end.recv_into(buffer)
                    if not left[end]:
                        ended.append(time.monotonic() - started)
                if not left[end]:
                    selector.unregister(end)
    return ended


class Shares(NamedTuple):
    pause_s: float
    even_s: float
    """The time at which all connections would end if their shares were even."""
    last: list[float]
    """For each round the time at which the last connection of all nodes ended, over that."""
    first: list[float]
    """For each round and node the time at which its first connection ended, over that."""
    spread: float
    """The deviation of a connection's mean rate within its node and round, over the mean."""


def measure(
    network: Network, size_bytes: int, pauses_s: Sequence[float], rounds: int
) -> list[Shares]:
    found = []
    asked = Rounds(network, size_bytes)
    with Cluster(work, asked, nodes=network.nodes, network=network) as cluster:
        cluster.ask_all("listen")
        cluster.ask_all("connect")
        for pause_s in pauses_s:
            times = [_round(cluster, pause_s) for _ in range(rounds + 1)][1:]
            found.append(_shares(network, size_bytes, pause_s, times))
        for each in cluster.connections:
            each.send(None)
    return found


def simulate(
    network: Network, size_bytes: int, pause_s: float, rounds: int, spread: float
) -> Shares:
    """Simulate the same exchange, with `Kernel.window_spread`."""
    link, nodes = lab_link(network, latency_s=100e-6), range(network.nodes)
    crowds = plan_crowds(network.nodes, groups=None)
    hosts = Hosts()
    cluster = SimulatedCluster(link, hosts, crowds=crowds, open_ports=False)
    buffer_bytes = SEND_BUFFER_BYTES // network.buffer_scale
    kernel = hosts.kernel(
        link,
        connections=len(nodes) - 1,
        unsent_bytes=sys.maxsize,
        buffer_bytes=buffer_bytes,
        window_spread=spread,
    )
    ended: list[list[float]] = [[] for _ in nodes]

    def deliver(there: int) -> Callable[[Any], None]:
        return lambda _: ended[there].append(cluster.clock.now_s)

    connections = [
        cluster.link_to(here, there, Way(there, lambda _: None, deliver(there), kernel))
        for here in nodes
        for there in nodes
        if here != there
    ]
    times = []
    for _ in range(rounds):
        starts_s = cluster.clock.now_s + pause_s
        for connection in connections:
            cluster.clock.at(starts_s, partial(connection.send, size_bytes=size_bytes))
        cluster.clock.run(lambda: sum(map(len, ended)) == len(connections))
        times.append([[end - starts_s for end in node] for node in ended])
        for node in ended:
            node.clear()
    return _shares(network, size_bytes, pause_s, times)


def _shares(
    network: Network, size_bytes: int, pause_s: float, times: Sequence[list[list[float]]]
) -> Shares:
    """The shares of ``times``: by round, node and connection, until its last byte was in."""
    even_s = (network.nodes - 1) * size_bytes * HEADER_FACTOR * 8 / network.rate_bits_per_s
    rates = [[1 / end for end in node] for nodes in times for node in nodes]
    ratios = [rate / statistics.fmean(node) for node in rates for rate in node]
    return Shares(
        pause_s=pause_s,
        even_s=even_s,
        last=[max(map(max, nodes)) / even_s for nodes in times],
        first=[min(node) / even_s for nodes in times for node in nodes],
        spread=statistics.pstdev(ratios),
    )


def _round(cluster: Cluster, pause_s: float) -> list[list[float]]:
    times: list[list[float]] = cluster.ask_all(time.monotonic() + pause_s + _LEAD_S)
    return times


def main(arguments: Sequence[str] | None = None) -> list[Shares]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="76.7Mbit")
    parser.add_argument("--size", type=float, default=1.6, help="MB on each connection")
    parser.add_argument("--pauses", default="0,0.5,1,2", help="seconds before a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scale", type=int, default=16, help="divides the kernel's send buffers")
    parser.add_argument("--spread", type=float, help="simulate, with windows that differ so much")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.out is not None:
        writable(options.out.parent)
    network = Network(
        nodes=options.nodes,
        rate_bits_per_s=parse_rate("--rate", options.rate),
        buffer_scale=options.scale,
    )
    pauses_s = [float(pause) for pause in options.pauses.split(",")]
    size_bytes = int(options.size * 1e6)
    if options.spread is None:
        found = measure(network, size_bytes, pauses_s, options.rounds)
    else:
        about = (options.rounds, options.spread)
        found = [simulate(network, size_bytes, pause_s, *about) for pause_s in pauses_s]
    for each in found:
        print(
            f"pause {each.pause_s:g} s: the last ends at {statistics.median(each.last):.2f} of"
            f" {each.even_s:.2f} s ({min(each.last):.2f} to {max(each.last):.2f}), a node's first"
            f" at {statistics.median(each.first):.2f}; rates differ by {each.spread:.0%}"
        )
    if options.out is not None:
        options.out.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n")
    return found


if __name__ == "__main__":
    from foreprop_lab.benchmarks import tcpshares  # nodes find what they run by its name

    tcpshares.main()
