"""Links of nodes as the lab makes them, and as the simulator has them: a bucket and a queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from foreprop.workload.limit import HEADERS_BYTES, PACKET_BYTES
from foreprop.workload.links import CrossTraffic, LinkRate

NETWORK_PREFIX = "10.213.0"
SWITCH_ADDRESS = f"{NETWORK_PREFIX}.254"
"""Only needed for `CrossTraffic`."""
_QUEUE_S = 0.05
_BURST_BYTES = 50_000
_LEAST_BURST_S = 0.0005  # so that timers that end late do not cost rate on fast links


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes with one link each, of the same rate in both directions."""

    nodes: int
    rate_bits_per_s: float
    link_rates: tuple[LinkRate, ...] = ()
    """Of links that are not as fast as the others."""
    cross_traffic: tuple[CrossTraffic, ...] = ()
    shape_ingress: bool = True
    """Also shape the bridge's port towards each node, as a switch would."""
    buffer_scale: int = 1
    """Divides TCP's largest automatic send buffer, as the model's arrays are divided."""
    burst_bytes: int = _BURST_BYTES
    """At least that many of each bucket's tokens. What TCP hands down as one (up to 64 KiB) and is
    larger than this the kernel cuts into packets first, which costs the CPU several times more."""

    def address(self, node: int) -> str:
        return f"{NETWORK_PREFIX}.{node + 1}"

    def rate_of(self, node: int) -> float:
        """Of the node's link, bit/s."""
        own = next((each for each in self.link_rates if each.node == node), None)
        return self.rate_bits_per_s if own is None else own.of(self.rate_bits_per_s)

    def left_of(self, node: int) -> float:
        """Of that, what another job leaves in the long run."""
        traffic = self.traffic_of(node)
        return self.rate_of(node) * (1.0 if traffic is None else traffic.left)

    def traffic_of(self, node: int) -> CrossTraffic | None:
        return next((each for each in self.cross_traffic if each.node == node), None)

    def bucket(self, node: int | None = None) -> tuple[int, int]:
        """Of a link's token bucket: bytes that may pass at once, and that may wait in its queue.

        None: of a link that is as fast as most.
        """
        rate = int(self.rate_bits_per_s if node is None else self.rate_of(node))
        burst_bytes = int(max(self.burst_bytes, rate / 8 * _LEAST_BURST_S))
        return burst_bytes, int(rate / 8 * _QUEUE_S) + burst_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSetting:
    """A node's link, the same in both directions."""

    rate_bits_per_s: float
    latency_s: float
    """From one end of a direction to the other, queues left out."""
    burst_bytes: float
    """What may pass at once after the link has been idle (`tc tbf`); a real link has none."""
    queue_bytes: float
    """What waits in front of the link before packets are dropped: TCP fills it."""
    cross_traffic: CrossTraffic | None = None

    @property
    def left_bits_per_s(self) -> float:
        """Of the rate, what another job leaves in the long run."""
        traffic = self.cross_traffic
        return self.rate_bits_per_s * (1.0 if traffic is None else traffic.left)


class Queue(Protocol):
    """What bytes pass; see `LinkDirection`."""

    def delay_s(self, now_s: float) -> float: ...

    def accept(self, now_s: float, wire_bytes: int) -> float: ...


class LinkDirection:
    """What a node sends (egress), or what the switch's port sends to it. First in, first out."""

    __slots__ = ("_burst_s", "_busy_until_s", "_byte_s", "carried_bytes")

    def __init__(self, setting: LinkSetting) -> None:
        self._byte_s = 8 / setting.rate_bits_per_s
        self._burst_s = setting.burst_bytes * self._byte_s
        self._busy_until_s = -self._burst_s
        self.carried_bytes = 0

    def delay_s(self, now_s: float) -> float:
        """How long what comes now has to wait."""
        waits_s = self._busy_until_s - now_s
        return waits_s if waits_s > 0.0 else 0.0

    def left_bytes(self, now_s: float) -> int:
        """What has passed until now, and does not wait any more."""
        return self.carried_bytes - round(self.delay_s(now_s) / self._byte_s)

    def accept(self, now_s: float, wire_bytes: int) -> float:
        """Queue a packet or several; returns when the last of them has left."""
        busy_s = self._busy_until_s
        idle_since_s = now_s - self._burst_s
        if busy_s < idle_since_s:
            busy_s = idle_since_s
        busy_s += wire_bytes * self._byte_s
        self._busy_until_s = busy_s
        self.carried_bytes += wire_bytes
        return busy_s if busy_s > now_s else now_s


class SharedDirection(LinkDirection):
    """Beside another job's bytes, which are not held up: what is left of the rate is ours."""

    __slots__ = ("_traffic",)

    def __init__(self, setting: LinkSetting, traffic: CrossTraffic) -> None:
        super().__init__(setting)
        self._traffic = traffic

    def accept(self, now_s: float, wire_bytes: int) -> float:
        begins_s = max(self._busy_until_s, now_s - self._burst_s)
        work_s = self._traffic.work_s(begins_s) + wire_bytes * self._byte_s
        self._busy_until_s = self._traffic.time_s(work_s)
        self.carried_bytes += wire_bytes
        return max(self._busy_until_s, now_s)


def link_direction(setting: LinkSetting) -> LinkDirection:
    if setting.cross_traffic is None:
        return LinkDirection(setting)
    return SharedDirection(setting, setting.cross_traffic)


class OpenPort(LinkDirection):
    """Of a link that is only shaped where nodes send: nothing waits."""

    __slots__ = ()

    def delay_s(self, now_s: float) -> float:
        del now_s
        return 0.0

    def accept(self, now_s: float, wire_bytes: int) -> float:
        self.carried_bytes += wire_bytes
        return now_s


def wire_bytes(size_bytes: int) -> int:
    """With the headers of all packets that carry it."""
    return size_bytes + HEADERS_BYTES * -(-size_bytes // PACKET_BYTES)
