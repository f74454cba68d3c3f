"""A simulated host and its kernel: physical quantities, the same for every run.

Sizes of the kernel are Linux's, or what the lab and `engine.stream` set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foreprop.plan import deployment
from foreprop.plan.limit import PACKET_BYTES
from foreprop_lab.setting.links import LinkSetting

_LEAST_BURST_BYTES = 2 * PACKET_BYTES
_LEAST_WINDOW_BYTES = 2 * PACKET_BYTES
_EVEN_RATIO, _LOSSY_RATIO = 1.3, 2.3
"""Ratios of what senders may hold to what a queue holds. Up to the first shares are even; from the
second on they differ most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """How the kernel treats a connection's bytes."""

    unsent_bytes: int
    """The kernel begins a segment while it holds fewer unsent (`TCP_NOTSENT_LOWAT`)."""
    buffer_bytes: int
    """The kernel begins a segment while it holds fewer unacknowledged (`SO_SNDBUF`)."""
    settles: bool
    """Whether a message counts as sent when a third of the buffer is free (`Stream.bound`)."""
    segment_bytes: int
    """Up to this the kernel adds to a segment that is not sent, whatever the bounds."""
    window_bytes: int
    """The most that is sent and not acknowledged."""
    window_spread: float
    """The deviation of the logarithm of a window, drawn anew every two seconds."""
    burst_bytes: int
    """The piece that the simulation moves: larger ones cost accuracy, smaller ones time."""
    latency_s: float
    """The latency of each of the two links on the way, queues left out."""

    def narrowed(self, share: float) -> Kernel:
        """The kernel for a way whose narrower link has this share of the others' rate and queue."""
        if share == 1:
            return self
        window_bytes = max(int(self.window_bytes * share), _LEAST_WINDOW_BYTES)
        burst_bytes = max(int(self.burst_bytes * share), _LEAST_BURST_BYTES)
        return replace(
            self,
            window_bytes=window_bytes,
            burst_bytes=min(burst_bytes, self.segment_bytes, window_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts(deployment.Hosts):
    """Every host of a cluster, as the simulator has it; the defaults are the lab's machine."""

    worker_frame_s: float = 0.0
    """A worker's processor time for each frame, without its bytes; 0 if it has time to spare."""
    server_frame_s: float = 0.0
    """The same of a server, or of a node's relays, which are one process."""
    server_row_byte_s: float | None = None
    """`server_byte_s` for bytes of a table's rows and their numbers, which are looked up and added
    one by one; None if they take as long as others."""
    gathered_byte_s: float = 0.0
    """A worker's processor time for each byte of others' rows that an all-gather brings: copies
    between devices and memory, and adding up row by row, one table after the other. With 0 rows are
    added up as dense elements are."""
    norm_elem_s: float = 2e-9
    """The time to add the square of one element to a norm (`core.norm`)."""
    buffer_share: float = 0.9
    """The share of a socket's buffer that is payload; the rest is the kernel's bookkeeping."""
    segment_bytes: int = 65_536
    """The kernel's largest segment, which it cuts into packets late (GSO)."""
    window_spread: float = 0.0
    """How unevenly connections share a link that loses packets (`Kernel.window_spread`): 0.3 was
    tried, see lab/docs/simulator.md."""
    burst_s: float = 0.0005
    """How long a link takes for the piece that the simulation moves: two packets or more."""

    def summing_s(self, elems: int, workers: int) -> float:
        """The time of a relay to sum so many elements of each of its node's workers."""
        return self.update_s + elems * workers * self.sum_elem_s

    def measuring_s(self, elems: int, workers: int) -> float:
        """The time to sum so many elements of each worker, and the sum's squares for the norm."""
        return self.summing_s(elems, workers) + elems * self.norm_elem_s

    def spread_of(self, link: LinkSetting, held_bytes: float) -> float:
        """The spread of windows, if senders may have so many bytes in one link's queue together.

        What fits is shared evenly. What does not is lost, and the connection that has lost it sends
        less for a while (measured: `foreprop_lab.benchmarks.tcpshares`).
        """
        ratio = held_bytes * self.buffer_share / link.queue_bytes
        share = (ratio - _EVEN_RATIO) / (_LOSSY_RATIO - _EVEN_RATIO)
        return self.window_spread * min(1.0, max(0.0, share))

    def kernel(
        self,
        link: LinkSetting,
        *,
        connections: int,
        unsent_bytes: int,
        buffer_bytes: int,
        settles: bool = False,
        window_spread: float = 0.0,
    ) -> Kernel:
        """The kernel where so many ``connections`` share each link; `SO_SNDBUF` is given."""
        burst_bytes = int(link.rate_bits_per_s / 8 * self.burst_s)
        window_bytes = max(int(link.queue_bytes / connections), _LEAST_WINDOW_BYTES)
        return Kernel(
            unsent_bytes=unsent_bytes,
            buffer_bytes=int(buffer_bytes * self.buffer_share),
            settles=settles,
            segment_bytes=self.segment_bytes,
            window_bytes=window_bytes,
            window_spread=window_spread,
            burst_bytes=min(max(burst_bytes, _LEAST_BURST_BYTES), self.segment_bytes, window_bytes),
            latency_s=link.latency_s,
        )
