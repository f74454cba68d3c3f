"""Links of nodes as the lab makes them, and as the simulator has them: a bucket and a queue.

A node's link may differ from the others by its rate, and by another job's bytes on it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreprop.errors import ConfigError
from foreprop.plan.limit import HEADERS_BYTES, PACKET_BYTES
from foreprop.quantities import parse_count, parse_rate, parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """The rate of a node's link, in both directions: a ``factor`` of the others', or a rate."""

    node: int
    factor: float | None = None
    rate_bits_per_s: float | None = None

    def __post_init__(self) -> None:
        value = self.rate_bits_per_s if self.factor is None else self.factor
        if value is None or not 0 < value < math.inf:
            raise ConfigError(
                f"link_rates has {value} for node {self.node}; it must be positive and finite"
            )

    def beside(self, others_bits_per_s: float) -> float:
        return self.rate_bits_per_s or others_bits_per_s * (self.factor or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTraffic:
    """Another job's bytes on one node's link, in both directions, for part of the time."""

    node: int
    share: float
    """Its part of the link's rate, while it is sent."""
    period_s: float = 1.0
    duty: float = 1.0
    """The share of each period, from its start, in which it is sent."""

    def __post_init__(self) -> None:
        checks = {
            f"the share {self.share:g}": (0 < self.share < 1, "above 0 and below 1"),
            f"the period {self.period_s:g} s": (0 < self.period_s < math.inf, "positive"),
            f"the duty {self.duty:g}": (0 < self.duty <= 1, "above 0 and at most 1"),
        }
        for what, (holds, allowed) in checks.items():
            if not holds:
                raise ConfigError(
                    f"cross_traffic has {what} for node {self.node}; it must be {allowed}"
                )

    @property
    def left(self) -> float:
        """The share of the link's rate that is left to others, in the long run."""
        return 1 - self.share * self.duty

    def work_s(self, time_s: float) -> float:
        """How many seconds of the whole link have been left to us from time 0 until then."""
        periods, rest_s = divmod(time_s, self.period_s)
        shared_s = min(rest_s, self.duty * self.period_s)
        return periods * self.period_s * self.left + rest_s - self.share * shared_s

    def time_s(self, work_s: float) -> float:
        """The time until which so much work has been left to us: the inverse of `work_s`."""
        periods, rest_s = divmod(work_s, self.period_s * self.left)
        shared_s = self.duty * self.period_s * (1 - self.share)
        if rest_s < shared_s:
            return periods * self.period_s + rest_s / (1 - self.share)
        return periods * self.period_s + self.duty * self.period_s + rest_s - shared_s

    def least_s(self, work_s: float) -> float:
        """How long so much work takes if it begins at the best moment, when a pause begins."""
        starts_s = self.duty * self.period_s
        return self.time_s(self.work_s(starts_s) + work_s) - starts_s


def parse_link_rates(text: str) -> tuple[LinkRate, ...]:
    """Read ``3:0.5,2:40Mbit``: a factor or a rate by node; raises `ConfigError`."""
    rates = []
    for part in text.split(","):
        node, colon, value = part.partition(":")
        if not colon:
            raise ConfigError(f"link_rates has {part!r}; it must be NODE:FACTOR or NODE:RATE")
        number, amount = parse_count("link_rates", node), _maybe_number(value)
        rate = parse_rate("link_rates", value) if amount is None else None
        rates.append(LinkRate(node=number, factor=amount, rate_bits_per_s=rate))
    return tuple(rates)


def parse_cross_traffic(text: str) -> tuple[CrossTraffic, ...]:
    """Read ``3:0.4`` or ``3:0.4:2s:0.5``: node, share, period and duty; raises `ConfigError`."""
    traffic = []
    for part in text.split(","):
        node, *values = part.split(":")
        numbers = [_maybe_number(value) for value in (*values[:1], *values[2:])]
        if len(values) not in (1, 3) or None in numbers:
            raise ConfigError(
                f"cross_traffic has {part!r}; it must be NODE:SHARE or NODE:SHARE:PERIOD:DUTY, as"
                " 3:0.4:2s:0.5"
            )
        share, *duty = [number for number in numbers if number is not None]
        number = parse_count("cross_traffic", node)
        if duty:
            period_s = parse_time("cross_traffic", values[1])
            named = {"period_s": period_s, "duty": duty[0]}
            traffic.append(CrossTraffic(node=number, share=share, **named))
        else:
            traffic.append(CrossTraffic(node=number, share=share))
    return tuple(traffic)


def _maybe_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_links(rates: Sequence[LinkRate], traffic: Sequence[CrossTraffic], nodes: int) -> None:
    """Raise `ConfigError` for a node that does not exist, or is named twice."""
    for option, given in (("link_rates", rates), ("cross_traffic", traffic)):
        named = [each.node for each in given]
        for node in named:
            if not 0 <= node < nodes:
                raise ConfigError(f"{option} has node {node}; there are 0 to {nodes - 1}")
            if named.count(node) > 1:
                raise ConfigError(f"{option} names node {node} twice")


NETWORK_PREFIX = "10.213.0"
SWITCH_ADDRESS = f"{NETWORK_PREFIX}.254"
"""The switch's own address, needed only for `CrossTraffic`."""
_QUEUE_S = 0.05
_BURST_BYTES = 50_000
_LEAST_BURST_S = 0.0005  # so that timers that end late do not cost rate on fast links


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes with one link each, of the same rate in both directions."""

    nodes: int
    rate_bits_per_s: float
    link_rates: tuple[LinkRate, ...] = ()
    cross_traffic: tuple[CrossTraffic, ...] = ()
    shape_ingress: bool = True
    """Whether the bridge's port towards each node is shaped, too, as a switch's would be."""
    buffer_scale: int = 1
    """The divisor of TCP's largest automatic send buffer, as the model's arrays are divided."""
    burst_bytes: int = _BURST_BYTES
    """The least tokens of each bucket. A segment of TCP's (up to 64 KiB) that is larger the kernel
    cuts into packets first, which costs the CPU several times more."""

    def address(self, node: int) -> str:
        return f"{NETWORK_PREFIX}.{node + 1}"

    def rate_of(self, node: int) -> float:
        own = next((each for each in self.link_rates if each.node == node), None)
        return self.rate_bits_per_s if own is None else own.beside(self.rate_bits_per_s)

    def left_of(self, node: int) -> float:
        traffic = self.traffic_of(node)
        return self.rate_of(node) * (1.0 if traffic is None else traffic.left)

    def traffic_of(self, node: int) -> CrossTraffic | None:
        return next((each for each in self.cross_traffic if each.node == node), None)

    def bucket(self, node: int | None = None) -> tuple[int, int]:
        """A link's token bucket: bytes that may pass at once, and that may wait in its queue.

        Without a node it is that of a usual link.
        """
        rate = int(self.rate_bits_per_s if node is None else self.rate_of(node))
        burst_bytes = int(max(self.burst_bytes, rate / 8 * _LEAST_BURST_S))
        return burst_bytes, int(rate / 8 * _QUEUE_S) + burst_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSetting:
    """A node's link, the same in both directions."""

    rate_bits_per_s: float
    latency_s: float
    """The time from one end to the other, queues left out."""
    burst_bytes: float
    """How much may pass at once after the link has been idle (`tc tbf`); a real link has none."""
    queue_bytes: float
    """How much may wait in front of the link before packets are dropped: TCP fills it."""
    cross_traffic: CrossTraffic | None = None

    @property
    def left_bits_per_s(self) -> float:
        traffic = self.cross_traffic
        return self.rate_bits_per_s * (1.0 if traffic is None else traffic.left)


class Queue(abc.ABC):
    """A queue that bytes pass, first in, first out."""

    __slots__ = ()

    @abc.abstractmethod
    def delay_s(self, now_s: float) -> float:
        """How long a packet that comes now has to wait."""

    @abc.abstractmethod
    def accept(self, now_s: float, wire_bytes: int) -> float:
        """Queue a packet or several; returns when the last of them has left."""


class LinkDirection(Queue):
    """One direction of a link: a node's egress, or the switch's port to it."""

    __slots__ = ("_burst_s", "_busy_until_s", "_byte_s", "carried_bytes")

    def __init__(self, setting: LinkSetting) -> None:
        self._byte_s = 8 / setting.rate_bits_per_s
        self._burst_s = setting.burst_bytes * self._byte_s
        self._busy_until_s = -self._burst_s
        self.carried_bytes = 0

    def delay_s(self, now_s: float) -> float:
        waits_s = self._busy_until_s - now_s
        return waits_s if waits_s > 0.0 else 0.0

    def left_bytes(self, now_s: float) -> int:
        """How many bytes have passed until now, without those that still wait."""
        return self.carried_bytes - round(self.delay_s(now_s) / self._byte_s)

    def accept(self, now_s: float, wire_bytes: int) -> float:
        busy_s = self._busy_until_s
        idle_since_s = now_s - self._burst_s
        if busy_s < idle_since_s:
            busy_s = idle_since_s
        busy_s += wire_bytes * self._byte_s
        self._busy_until_s = busy_s
        self.carried_bytes += wire_bytes
        return busy_s if busy_s > now_s else now_s


class SharedDirection(LinkDirection):
    """A direction with another job's bytes, which nothing holds up: the rest is left to us."""

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
    """The port of a link that is shaped only where nodes send: nothing waits."""

    __slots__ = ()

    def delay_s(self, now_s: float) -> float:
        del now_s
        return 0.0

    def accept(self, now_s: float, wire_bytes: int) -> float:
        self.carried_bytes += wire_bytes
        return now_s


def wire_bytes(size_bytes: int) -> int:
    return size_bytes + HEADERS_BYTES * -(-size_bytes // PACKET_BYTES)


def carried_bytes(frames: int, size_bytes: float) -> float:
    """The bytes that a node's interface counts for sending frames, with as many coming back.

    Frames leave one by one (TCP_NODELAY), each as one packet if TCP can hand it down as one; the
    card cuts it later. Each frame that comes is acknowledged by a packet without data, or every
    second one if they fill no packet (RFC 5681, section 4.2).
    """
    each_bytes = size_bytes / max(1, frames)
    packets = 1.0 if each_bytes <= _BURST_BYTES else each_bytes / PACKET_BYTES
    acknowledged = 1.0 if each_bytes > PACKET_BYTES else 0.5
    return size_bytes + HEADERS_BYTES * frames * (packets + acknowledged)
