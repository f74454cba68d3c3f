"""What a simulated host and its kernel are like: physical quantities, the same for every run.

Sizes of the kernel are Linux's, or what the lab and `link.stream` set. Times of the host are of the
order that `foreprop bench overhead` and `bench wire` measure; ten times as much changes a step of
ResNet-50 and Sockeye at balance 1.0 by less than 0.5 % with p3 and slicing, by up to 2.6 % with
kvstore.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foreprop.workload.limit import PACKET_BYTES
from foreprop.workload.network import LinkSetting

_LEAST_BURST_BYTES = 2 * PACKET_BYTES
_LEAST_WINDOW_BYTES = 2 * PACKET_BYTES
_EVEN_RATIO, _LOSSY_RATIO = 1.3, 2.3
"""Of what senders may hold over what a queue holds: until where shares are even, and from where on
they differ most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What the kernel does with a connection's bytes."""

    unsent_bytes: int
    """It begins a new segment while it holds fewer unsent (`TCP_NOTSENT_LOWAT`)."""
    buffer_bytes: int
    """It begins a new segment while it holds fewer, unsent or unacknowledged (`SO_SNDBUF`)."""
    settles: bool
    """A message has been sent when another third of the buffer is free (`Stream.bound`)."""
    segment_bytes: int
    """To a segment that it has begun and not sent it adds, whatever the bounds, up to this."""
    window_bytes: int
    """Sent and not acknowledged."""
    window_spread: float
    """Deviation of the logarithm of a window, drawn anew every two seconds; 0: all are alike."""
    burst_bytes: int
    """What the simulation moves as one: more costs accuracy, less costs time."""
    latency_s: float
    """Of each of the two links on the way, queues left out."""

    def narrowed(self, share: float) -> Kernel:
        """For a way whose narrower link has this share of the others' rate, and of their queue."""
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
class Hosts:
    """Every host of a cluster; the defaults are the lab's machine."""

    send_s: float = 60e-6
    """From the last byte taken to the next frame: a thread wakes, the machine decides."""
    receive_s: float = 150e-6
    """From the last byte of a frame to the machine's event."""
    worker_frame_s: float = 0.0
    """Of the processor for each frame of a worker, its bytes left out; 0: it has time to spare."""
    server_frame_s: float = 0.0
    """The same for a server, or for a node's relays, which are one process."""
    server_byte_s: float = 0.0
    """Of a server's processor for each byte that it receives or sends: copies, serialising, sums.
    What passes between a node's workers and its relays costs nothing."""
    server_row_byte_s: float | None = None
    """The same where the byte is a table's row's or its number's, looked up and added one by one;
    None: as any other."""
    relay_byte_s: float = 1.2e-9
    """Of the process of a node's relays, for each byte that it pushes on, answers counted in; for
    the model, not for the simulation. This and the next: with two and four workers (docs/plan.md).
    """
    relay_worker_byte_s: float = 0.6e-9
    """The same for each byte that one of the node's workers pushes to it."""
    gathered_byte_s: float = 0.0
    """Of a worker's processor for each byte of others' rows that an all-gather brings: copies
    between devices and memory, and adding up row by row, one table after the other. 0: rows are
    added up as dense elements are."""
    update_s: float = 60e-6
    """To begin an update, whatever its size."""
    sum_elem_s: float = 0.4e-9
    """To add one element of one worker's gradient."""
    update_elem_s: float = 0.7e-9
    """To apply the optimizer (SGD with momentum) to one element."""
    norm_elem_s: float = 2e-9
    """To add the square of one element to a norm (`core.norm`)."""
    copy_byte_s: float = 0.4e-9
    """Loopback, for each byte."""
    buffer_share: float = 0.9
    """Of a socket's buffer what is payload; the rest is the kernel's bookkeeping."""
    segment_bytes: int = 65_536
    """The kernel's largest segment, which it cuts into packets late (GSO)."""
    window_spread: float = 0.0
    """How unevenly connections share a link that loses packets (`Kernel.window_spread`): 0.3 was
    tried, see docs/simulator.md."""
    burst_s: float = 0.0005
    """What the simulation moves as one takes a link this long, but has at least two packets."""

    def summing_s(self, elems: int, workers: int) -> float:
        """For a relay to sum so many elements of each of its node's workers."""
        return self.update_s + elems * workers * self.sum_elem_s

    def measuring_s(self, elems: int, workers: int) -> float:
        """To sum so many elements of each worker, and their squares, if updates need the norm."""
        return self.summing_s(elems, workers) + elems * self.norm_elem_s

    def updating_s(self, elems: int, workers: int) -> float:
        """For a server to sum and update so many elements; ``workers`` 0: they are summed."""
        return self.update_s + elems * (self.update_elem_s + workers * self.sum_elem_s)

    def spread_of(self, link: LinkSetting, held_bytes: float) -> float:
        """Of windows, if senders may have so many bytes in one link's queue together.

        What fits is shared evenly; what does not is lost, and whose packets those are has less for
        a while (measured: `benchmarks.tcpshares`).
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
        """``connections``: that share each link; ``buffer_bytes``: what `SO_SNDBUF` tells."""
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
