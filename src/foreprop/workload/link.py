"""One direction of a node's link: a token bucket and the queue in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from foreprop.workload.limit import HEADERS_BYTES, PACKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSetting:
    """Every node's link, the same in both directions."""

    rate_bits_per_s: float
    latency_s: float
    """From one end of a direction to the other, queues left out."""
    burst_bytes: float
    """What may pass at once after the link has been idle (`tc tbf`); a real link has none."""
    queue_bytes: float
    """What waits in front of the link before packets are dropped: TCP fills it."""


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
