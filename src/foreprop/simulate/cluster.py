"""A simulated cluster: nodes, their links, and the connections between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreprop.lab.network import Network
from foreprop.lab.profile import Layer
from foreprop.simulate.clock import Clock
from foreprop.simulate.connection import Connection, Deliver, Kernel, Loopback, Path, Sent
from foreprop.simulate.device import Device, Synchronisation
from foreprop.simulate.hosts import Hosts
from foreprop.simulate.link import LinkDirection, LinkSetting, OpenPort


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    """What the devices have seen, by rank and step, in seconds."""

    step_s: list[list[float]]
    waited_s: list[list[float]]
    sent_bytes: list[int]
    """By node, of all steps, with headers."""


class Cluster:
    """Nodes with a link each, one clock for all. Ranks are numbered by node."""

    def __init__(
        self,
        link: LinkSetting,
        hosts: Hosts,
        *,
        nodes: int,
        workers_per_node: int = 1,
        open_ports: bool,
    ) -> None:
        self.clock = Clock()
        self.link = link
        self.nodes = range(nodes)
        self.ranks = range(nodes * workers_per_node)
        self.workers_per_node = workers_per_node
        self._hosts = hosts
        port = OpenPort if open_ports else LinkDirection
        self._egress = [LinkDirection(link) for _ in self.nodes]
        self._ports = [port(link) for _ in self.nodes]

    def node_of(self, rank: int) -> int:
        return rank // self.workers_per_node

    def connect(
        self, here: int, there: int, kernel: Kernel, *, peer: int, sent: Sent, deliver: Deliver
    ) -> Connection | Loopback:
        """One direction, from a process on node ``here`` to one on ``there``."""
        if here == there:
            return Loopback(
                self.clock,
                byte_s=self._hosts.copy_byte_s,
                latency_s=self.link.latency_s,
                peer=peer,
                sent=sent,
                deliver=deliver,
            )
        path = Path(
            egress=self._egress[here],
            port=self._ports[there],
            back_egress=self._egress[there],
            back_port=self._ports[here],
        )
        return Connection(self.clock, path, kernel, peer=peer, sent=sent, deliver=deliver)

    def train(
        self,
        layers: Sequence[Layer],
        synchronisations: Sequence[Synchronisation],
        *,
        steps: int,
        jitter: float,
    ) -> SimulatedSteps:
        """Run a device for each rank until all of them have made their steps."""
        training = len(synchronisations)

        def finished() -> None:
            nonlocal training
            training -= 1

        devices = [
            Device(
                self.clock,
                layers,
                synchronisation,
                steps=steps,
                finished=finished,
                jitter=jitter,
                seed=rank,
            )
            for rank, synchronisation in enumerate(synchronisations)
        ]
        for device in devices:
            device.start()
        self.clock.run(lambda: not training)
        return SimulatedSteps(
            step_s=[device.step_s for device in devices],
            waited_s=[device.waited_s for device in devices],
            sent_bytes=[link.carried_bytes for link in self._egress],
        )


_LATENCY_S = 50e-6
"""Of a veth pair and a bridge, with the processes' wake-up."""


def lab_link(network: Network) -> LinkSetting:
    """A link as `lab.network` shapes it."""
    rate = network.rate_bits_per_s
    burst_bytes, queue_bytes = network.bucket()
    return LinkSetting(
        rate_bits_per_s=rate,
        latency_s=_LATENCY_S,
        burst_bytes=burst_bytes,
        queue_bytes=queue_bytes,
    )
