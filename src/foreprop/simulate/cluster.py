"""A simulated cluster: nodes, their links, the connections between them and who is at the ends."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foreprop.simulate.connection import Clock, Connection, Deliver, Loopback, Path, Way
from foreprop.simulate.device import CrowdDevice, Device, Synchronisation
from foreprop.simulate.served import Exchange
from foreprop.simulate.setting import Crowd, SimulatedSetting
from foreprop.workload.hosts import Hosts, Kernel
from foreprop.workload.network import LinkSetting, Network, OpenPort, link_direction

Sample = tuple[float, int, int]
"""Of a node's link: when, and what it has sent and received until then, bytes with headers."""
_SAMPLING_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    """What the devices have seen, by rank and step, in seconds (see `Cluster.ranks`)."""

    step_s: list[list[float]]
    waited_s: list[list[float]]
    sent_bytes: list[int]
    """By crowd, what one of its nodes has sent in all steps, with headers."""
    samples: list[Sample] = field(default_factory=list)
    """Of node 0, every 10 ms, if the setting has ``sample_network``."""
    backup_workers: int = 0
    """How many workers no step has waited for."""

    def mean_step_s(self, uncounted: int) -> float:
        """Of all ranks' steps but the first ones."""
        return statistics.fmean(s for steps in self.step_s for s in steps[uncounted:])


class Cluster:
    """Crowds of nodes with a link each, one clock for all. ``own_links``: of nodes whose differ.

    What is simulated of a crowd is one of its nodes, numbered as the crowds are, with all its
    workers. Nodes of several workers, or with links of their own, do not stand for others.

    ``first_step``: the number of the first step among those that are drawn. ``dedicated_servers``:
    nodes that follow, with links like most and without workers.
    """

    def __init__(
        self,
        link: LinkSetting,
        hosts: Hosts,
        *,
        crowds: Sequence[Crowd],
        workers_per_node: int = 1,
        open_ports: bool,
        own_links: Mapping[int, LinkSetting] | None = None,
        first_step: int = 1,
        dedicated_servers: int = 0,
    ) -> None:
        self.clock = Clock()
        self.link = link
        self.open_ports = open_ports
        self.crowds = crowds
        self.nodes = sum(crowd.members for crowd in crowds)
        self.workers_per_node = workers_per_node
        self.workers = self.nodes * workers_per_node
        self.ranks = range(len(crowds) * workers_per_node)
        """Of the workers that are simulated, numbered by node."""
        self.hosts = hosts
        self._first_step = first_step
        self._first_server = len(crowds) if dedicated_servers else 0
        self._links = [(own_links or {}).get(crowd.first, link) for crowd in crowds]
        self._links += [link] * dedicated_servers
        port = OpenPort if open_ports else link_direction
        self._egress = [link_direction(each) for each in self._links]
        self._ports = [port(each) for each in self._links]

    @property
    def is_symmetric(self) -> bool:
        """Whether any node stands for others."""
        return self.nodes > len(self.crowds)

    @property
    def sent_bytes(self) -> list[int]:
        return [link.carried_bytes for link in self._egress[: len(self.crowds)]]

    def node_of(self, rank: int) -> int:
        return rank // self.workers_per_node

    def node_of_server(self, index: int) -> int:
        return self._first_server + index

    def connect(self, here: int, there: int, way: Way) -> Connection | Loopback:
        """One direction, from a process on node ``here`` to one on ``there``."""
        return self.loop_back(way) if here == there else self.link_to(here, there, way)

    def link_to(self, here: int, there: int, way: Way) -> Connection:
        """Over links, even from a node to itself: that is then another one of its crowd."""
        path = Path(
            egress=self._egress[here],
            port=self._ports[there],
            back_egress=self._egress[there],
            back_port=self._ports[here],
        )
        rates = [self._links[node].left_bits_per_s for node in (here, there)]
        narrowed = way.kernel.narrowed(min(rates) / self.link.rate_bits_per_s)
        return Connection(self.clock, path, way._replace(kernel=narrowed))

    def loop_back(self, way: Way) -> Loopback:
        return Loopback(self.clock, way, byte_s=self.hosts.copy_byte_s)

    def train(
        self, setting: SimulatedSetting, synchronisations: Sequence[Synchronisation], *, steps: int
    ) -> SimulatedSteps:
        """Run a device for each rank until all of them have made their steps."""
        training = len(synchronisations)

        def finished() -> None:
            nonlocal training
            training -= 1

        devices = [
            self._device(setting, rank, synchronisation, steps=steps, finished=finished)
            for rank, synchronisation in zip(self.ranks, synchronisations, strict=True)
        ]
        for device in devices:
            device.start()
        samples: list[Sample] = []
        if setting.sample_network:
            self._sample(samples)
        self.clock.run(lambda: not training)
        return SimulatedSteps(
            step_s=[device.step_s[:steps] for device in devices],
            waited_s=[device.waited_s[:steps] for device in devices],
            sent_bytes=self.sent_bytes,
            samples=samples,
        )

    def _sample(self, samples: list[Sample]) -> None:
        """Again and again, as the lab reads its interface."""
        now_s = self.clock.now_s
        sent, received = (link[0].left_bytes(now_s) for link in (self._egress, self._ports))
        samples.append((now_s, sent, received))
        self.clock.at(now_s + _SAMPLING_S, self._sample, samples)

    def _device(
        self,
        setting: SimulatedSetting,
        rank: int,
        synchronisation: Synchronisation,
        *,
        steps: int,
        finished: Callable[[], None],
    ) -> Device:
        """Of a crowd whose members differ in nothing, that of one of them."""
        node, number = divmod(rank, self.workers_per_node)
        crowd = self.crowds[node]
        first = crowd.first * self.workers_per_node + number
        drawn = crowd.members > 1 and setting.unevenness.is_drawn
        made = CrowdDevice if drawn else Device
        return made(
            self.clock,
            setting.layers,
            synchronisation,
            steps=steps,
            finished=finished,
            draw=setting.draw(range(first, first + (crowd.members if drawn else 1))),
            first_step=self._first_step,
            goes_on=bool(setting.staleness),  # who is done first must not leave the others alone
        )


def lab_link(network: Network, *, latency_s: float, node: int | None = None) -> LinkSetting:
    """A link as `lab.network` shapes it; two of them are on the way from host to host.

    None: one that is like most.
    """
    burst_bytes, queue_bytes = network.bucket(node)
    return LinkSetting(
        rate_bits_per_s=network.rate_bits_per_s if node is None else network.rate_of(node),
        latency_s=latency_s / 2,
        burst_bytes=burst_bytes,
        queue_bytes=queue_bytes,
        cross_traffic=None if node is None else network.traffic_of(node),
    )


def own_links(network: Network, *, latency_s: float) -> dict[int, LinkSetting]:
    """By node, those that differ from the others."""
    differ = {each.node for each in network.link_rates}
    differ |= {each.node for each in network.cross_traffic}
    return {node: lab_link(network, latency_s=latency_s, node=node) for node in differ}


# Who is at the ends of the connections between two processes, and how these are joined.
Kernels = tuple[Kernel, Kernel]
"""Of pushes and of replies."""


class End(NamedTuple):
    """Of two connections, one in each direction."""

    node: int
    """A worker's or relay's as it is simulated, the number of its crowd; a server's own."""
    peer: int
    """What who is at the other end is called here."""
    exchange: Exchange
    receive: Deliver


Ways = tuple[Connection | Loopback, Connection | Loopback]
"""Forth and back."""


def ways_between(here: End, there: End, kernels: Kernels) -> tuple[Way, Way]:
    """Who pushes is ``here``, who replies ``there``."""
    pushes, replies = kernels
    return (
        Way(here.peer, here.exchange.taken, there.receive, pushes),
        Way(there.peer, there.exchange.taken, here.receive, replies),
    )


def connect_nodes(cluster: Cluster, here: End, there: End, kernels: Kernels) -> Ways:
    """Over the links of both nodes, or within one; no node stands for others."""
    forth, back = ways_between(here, there, kernels)
    return (
        cluster.connect(here.node, there.node, forth),
        cluster.connect(there.node, here.node, back),
    )


def join(here: End, there: End, ways: Ways) -> None:
    """Let both ends send over these, and each way carry the other one's acknowledgements."""
    forth, back = ways
    if isinstance(forth, Connection) and isinstance(back, Connection):
        forth.reverse, back.reverse = back, forth
    here.exchange.connections[here.peer] = forth
    there.exchange.connections[there.peer] = back
