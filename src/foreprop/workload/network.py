"""Links of nodes as the lab makes them and the simulator takes them to be: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

NETWORK_PREFIX = "10.213.0"
_QUEUE_S = 0.05
_BURST_BYTES = 50_000
_LEAST_BURST_S = 0.0005  # so that timers that end late do not cost rate on fast links


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes with one link each, of the same rate in both directions."""

    nodes: int
    rate_bits_per_s: float
    shape_ingress: bool = True
    """Also shape the bridge's port towards each node, as a switch would."""
    buffer_scale: int = 1
    """Divides TCP's largest automatic send buffer, as the model's arrays are divided."""
    burst_bytes: int = _BURST_BYTES
    """At least that many of each bucket's tokens. What TCP hands down as one (up to 64 KiB) and is
    larger than this the kernel cuts into packets first, which costs the CPU several times more."""

    def address(self, node: int) -> str:
        return f"{NETWORK_PREFIX}.{node + 1}"

    def bucket(self) -> tuple[int, int]:
        """Of a link's token bucket: bytes that may pass at once, and that may wait in its queue."""
        rate = int(self.rate_bits_per_s)
        burst_bytes = int(max(self.burst_bytes, rate / 8 * _LEAST_BURST_S))
        return burst_bytes, int(rate / 8 * _QUEUE_S) + burst_bytes
