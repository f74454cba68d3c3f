"""A simulated cluster: nodes, their links, the connections between them and who is at the ends."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foreprop_lab.setting.hosts import Hosts, Kernel
from foreprop_lab.setting.links import LinkSetting, Network, OpenPort, link_direction
from foreprop_lab.simulate.connection import Clock, Connection, Deliver, Loopback, Path, Way
from foreprop_lab.simulate.device import CrowdDevice, Device, Synchronisation
from foreprop_lab.simulate.served import Exchange
from foreprop_lab.simulate.setting import Crowd, SimulatedSetting

Sample = tuple[float, int, int]
"""A moment, and the bytes that a node's link has sent and received until then, with headers."""
_SAMPLING_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    """The devices' times by rank (see `Cluster.ranks`) and step, in seconds."""

    step_s: list[list[float]]
    waited_s: list[list[float]]
    sent_bytes: list[int]
    """The bytes, with headers, that one node of each crowd has sent in all steps."""
    samples: list[Sample] = field(default_factory=list)
    """Node 0's link every 10 ms, if the setting has ``sample_network``."""
    backup_workers: int = 0
    """How many workers each step has not waited for."""

    def mean_step_s(self, uncounted: int) -> float:
        """The mean of all ranks' steps but the first ones."""
        return statistics.fmean(s for steps in self.step_s for s in steps[uncounted:])


class Cluster:
    """Crowds of nodes with a link each, and one clock for all.

    Of each crowd one node is simulated, with all its workers; it has the crowd's number. Nodes of
    several workers, or with links of their own (``own_links``), do not stand for others. Nodes of
    ``dedicated_servers`` follow, with usual links and without workers. ``first_step`` is the number
    of the first step among those that are drawn.
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
        """The workers that are simulated, numbered by node."""
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
        return self.nodes > len(self.crowds)

    @property
    def sent_bytes(self) -> list[int]:
        return [link.carried_bytes for link in self._egress[: len(self.crowds)]]

    def node_of(self, rank: int) -> int:
        return rank // self.workers_per_node

    def node_of_server(self, index: int) -> int:
        return self._first_server + index

    def connect(self, here: int, there: int, way: Way) -> Connection | Loopback:
        return self.loop_back(way) if here == there else self.link_to(here, there, way)

    def link_to(self, here: int, there: int, way: Way) -> Connection:
        """Connect over links, even a node with itself: the other end is another of its crowd."""
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
        """The device of a worker, or one for all of a crowd whose members differ in nothing."""
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
    """The link of a node, or a usual one, as `lab.network` shapes it.

    From host to host it is passed twice: out of one node and into the other.
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
    """Links that differ from the others, by node."""
    differ = {each.node for each in network.link_rates}
    differ |= {each.node for each in network.cross_traffic}
    return {node: lab_link(network, latency_s=latency_s, node=node) for node in differ}


Kernels = tuple[Kernel, Kernel]
"""The settings for pushes and for replies."""


class End(NamedTuple):
    """One end of two connections, one in each direction."""

    node: int
    """The number of a worker's or relay's crowd, or of the node that has the server."""
    peer: int
    """The number that the process at the other end has here."""
    exchange: Exchange
    receive: Deliver


Ways = tuple[Connection | Loopback, Connection | Loopback]
"""The directions forth and back."""


def ways_between(here: End, there: End, kernels: Kernels) -> tuple[Way, Way]:
    """Both directions between a process that pushes, ``here``, and one that replies, ``there``."""
    pushes, replies = kernels
    return (
        Way(here.peer, here.exchange.taken, there.receive, pushes),
        Way(there.peer, there.exchange.taken, here.receive, replies),
    )


def connect_nodes(cluster: Cluster, here: End, there: End, kernels: Kernels) -> Ways:
    """Connect two ends over the links of their nodes, or within one; no node stands for others."""
    forth, back = ways_between(here, there, kernels)
    return (
        cluster.connect(here.node, there.node, forth),
        cluster.connect(there.node, here.node, back),
    )


def join(here: End, there: End, ways: Ways) -> None:
    """Let both ends send over two connections, each of which carries acknowledgements for both."""
    forth, back = ways
    if isinstance(forth, Connection) and isinstance(back, Connection):
        forth.reverse, back.reverse = back, forth
    here.exchange.connections[here.peer] = forth
    there.exchange.connections[there.peer] = back
