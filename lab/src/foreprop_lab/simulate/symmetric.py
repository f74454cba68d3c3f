"""Workers that stand for crowds, and every server: the connections between them.

Theory of operation. Every server that has slices is simulated, with its own slices; of each crowd
one worker. All members push the same at the same time, so what the worker sends to a server comes
in as many times as the crowd has members, and what a server sends to it, it sends so many times;
but not over a link to the member on its own node. Every node has a link, also those whose worker is
not simulated: it carries what that worker does as it carries the server's. On the members' links a
message takes as long as on the mean of them, on the server's until the last copy has passed. What
the first copy's receiver acknowledges is under way before that, so no link idles in between.

The bytes of every node and direction, the placement, and all decisions of the machines are exact.
This is not: members whose links are fuller, or which a server serves later, are behind the others,
and what they receive on their own node they have before the others do. With crowds of one node
each everything is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreprop_lab.setting.links import LinkSetting, OpenPort, Queue, wire_bytes
from foreprop_lab.simulate.cluster import Cluster, End, Kernels, Ways, ways_between
from foreprop_lab.simulate.connection import Connection, Path, Way
from foreprop_lab.simulate.setting import Crowd


class Links:
    """One direction of every node's link; see `links.LinkDirection`."""

    def __init__(self, setting: LinkSetting, nodes: int) -> None:
        self.byte_s = 8 / setting.rate_bits_per_s
        self.burst_s = setting.burst_bytes * self.byte_s
        self.busy_until_s: NDArray[np.float64] = np.full(nodes, -self.burst_s)
        self.carried_bytes: NDArray[np.float64] = np.zeros(nodes)

    def sent_bytes(self, crowds: Sequence[Crowd]) -> list[int]:
        each = [self.carried_bytes[crowd.first : crowd.nodes.stop] for crowd in crowds]
        return [round(float(carried.mean())) for carried in each]


class OneLink(Queue):
    """The link of one node, which carries ``copies`` of everything."""

    __slots__ = ("_copies", "_links", "_node")

    def __init__(self, links: Links, node: int, copies: int) -> None:
        self._links = links
        self._node = node
        self._copies = copies

    def delay_s(self, now_s: float) -> float:
        return max(float(self._links.busy_until_s[self._node]) - now_s, 0.0)

    def accept(self, now_s: float, wire_bytes: int) -> float:
        links, node = self._links, self._node
        size_bytes = wire_bytes * self._copies
        busy_s = max(float(links.busy_until_s[node]), now_s - links.burst_s)
        busy_s += size_bytes * links.byte_s
        links.busy_until_s[node] = busy_s
        links.carried_bytes[node] += size_bytes
        return max(busy_s, now_s)


class EachLink(Queue):
    """The links of a crowd's members but the node ``without``; their mean is what counts."""

    __slots__ = ("_busy_until_s", "_carried_bytes", "_links", "_members", "_without")

    def __init__(self, links: Links, crowd: Crowd, without: int) -> None:
        members = slice(crowd.first, crowd.nodes.stop)
        self._links = links
        self._busy_until_s = links.busy_until_s[members]
        self._carried_bytes = links.carried_bytes[members]
        self._members = crowd.members - (without in crowd.nodes)
        self._without = without - crowd.first if without in crowd.nodes else None

    def delay_s(self, now_s: float) -> float:
        return self._mean_s(now_s) - now_s

    def accept(self, now_s: float, wire_bytes: int) -> float:
        links, busy_until_s, without = self._links, self._busy_until_s, self._without
        kept_s = 0.0 if without is None else busy_until_s[without]
        np.maximum(busy_until_s, now_s - links.burst_s, out=busy_until_s)
        busy_until_s += wire_bytes * links.byte_s
        self._carried_bytes += wire_bytes
        if without is not None:
            busy_until_s[without] = kept_s
            self._carried_bytes[without] -= wire_bytes
        return self._mean_s(now_s)

    def _mean_s(self, now_s: float) -> float:
        until_s = np.maximum(self._busy_until_s, now_s)
        if self._without is not None:
            until_s[self._without] = 0.0
        return float(until_s.sum()) / self._members


class Bundle(Connection):
    """The connections of ``copies`` members of a crowd with one server, in one direction.

    If it ``fans_out``, from the server, the copies leave one after the other; otherwise they come
    in so. A burst has arrived when its last copy has; its first copy is acknowledged.
    """

    __slots__ = ("_behind_s", "_byte_s", "_fans_out")

    def __init__(
        self, cluster: Cluster, path: Path, way: Way, *, copies: int, fans_out: bool
    ) -> None:
        super().__init__(cluster.clock, path, way)
        self._byte_s = 8 / cluster.link.rate_bits_per_s
        self._behind_s = (copies - 1) * self._byte_s  # the last copy of each byte
        self._fans_out = fans_out

    def _leave(self, size: int) -> None:
        now_s, on_wire = self._clock.now_s, wire_bytes(size)
        left_s = self._egress.accept(now_s, on_wire)
        self._clock.at(left_s + self._latency_s, self._reach_port, size)
        if self._fans_out:
            first_s = max(now_s, left_s - on_wire * self._behind_s)
            self._clock.at(first_s + self._latency_s, self._first_reaches_port, size)

    def _first_reaches_port(self, size: int) -> None:
        now_s = self._clock.now_s
        left_s = now_s + self._port.delay_s(now_s) + wire_bytes(size) * self._byte_s
        self._clock.at(left_s + self._latency_s, self._acknowledge, size)

    def _reach_port(self, size: int) -> None:
        now_s, on_wire = self._clock.now_s, wire_bytes(size)
        left_s = self._port.accept(now_s, on_wire)
        self._clock.at(left_s + self._latency_s, self._arrive, size)
        if not self._fans_out:
            first_s = max(now_s, left_s - on_wire * self._behind_s)
            self._clock.at(first_s + self._latency_s, self._acknowledge, size)

    def _arrive(self, size: int) -> None:
        self._receive(size)


def connect_crowd(
    cluster: Cluster, links: tuple[Links, Links], here: End, there: End, kernels: Kernels
) -> Ways:
    """Connect a crowd's worker and a server; ``links`` are the nodes' two directions."""
    crowd, index = cluster.crowds[here.node], there.node
    forth, back = ways_between(here, there, kernels)
    copies = crowd.members - (index in crowd.nodes)
    if not copies:
        return cluster.loop_back(forth), cluster.loop_back(back)
    egress, ports = links
    workers, server = EachLink(egress, crowd, index), OneLink(egress, index, copies)
    workers_port: Queue = OpenPort(cluster.link)
    server_port: Queue = OpenPort(cluster.link)
    if not cluster.open_ports:
        workers_port, server_port = EachLink(ports, crowd, index), OneLink(ports, index, copies)
    forth_path = Path(egress=workers, port=server_port, back_egress=server, back_port=workers_port)
    back_path = Path(egress=server, port=workers_port, back_egress=workers, back_port=server_port)
    return (
        _bundle(cluster, forth_path, forth, copies=copies, fans_out=False),
        _bundle(cluster, back_path, back, copies=copies, fans_out=True),
    )


def _bundle(cluster: Cluster, path: Path, way: Way, *, copies: int, fans_out: bool) -> Connection:
    if copies > 1:
        return Bundle(cluster, path, way, copies=copies, fans_out=fans_out)
    return Connection(cluster.clock, path, way)
