"""What the kernel may hold of a connection follows what its round trips show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.sendqueue import SendBound, least_bytes

MIB = 1 << 20


def settled(bound: SendBound, rate_bytes_per_us: float, idle_us: float, peers: int = 1) -> int:
    """The bound on a link of this rate that so many connections with the same bound fill."""
    for _ in range(40):
        queued_us = max(0.0, peers * bound.bytes / rate_bytes_per_us - idle_us)
        bound.observe(round(idle_us + queued_us), round(idle_us))
    return bound.bytes


def test_a_queue_in_front_of_a_slow_link_leaves_the_least() -> None:
    assert settled(SendBound(24_000), rate_bytes_per_us=2.4, idle_us=150) == 6_000


def test_a_long_path_with_high_bandwidth_gets_what_it_can_hold() -> None:
    """10 Gbit/s over 2 ms hold 2.5 MB."""
    assert settled(SendBound(MIB), rate_bytes_per_us=1_250, idle_us=2_000) == MIB


def test_the_shortest_round_trip_is_remembered() -> None:
    """The kernel's is of five minutes, in which links of a training may always have a queue."""
    bound = SendBound(24_000)
    for shortest_us in (150, 5_000):
        for _ in range(10):
            bound.observe(6_000, shortest_us)
    assert bound.bytes == 6_000


@given(
    st.floats(1.0, 5_000.0),
    st.floats(20.0, 5_000.0),
    st.integers(1, 12),
    st.integers(16, 4096),
)
def test_a_link_is_filled_and_the_queue_stays_short(
    rate: float, idle_us: float, peers: int, most_kib: int
) -> None:
    most = most_kib * 1024
    found = settled(SendBound(most), rate, idle_us, peers)
    round_trip_us = max(idle_us, peers * found / rate)
    assert least_bytes(most) <= found <= most
    assert found == most or round_trip_us >= 1.4 * idle_us  # or else the link might be idle
    assert found == least_bytes(most) or round_trip_us <= 3.1 * idle_us


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), max_size=30))
def test_a_change_is_told_once(trips: list[tuple[int, int]]) -> None:
    bound = SendBound(1000)
    for round_trip_us, shortest_us in trips:
        before = bound.bytes
        assert bound.observe(round_trip_us, shortest_us) == (bound.bytes != before)
