"""Simulated links and connections beside what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foreprop.errors import InternalError
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.links import LinkDirection, LinkSetting, wire_bytes
from foreprop_lab.simulate.cluster import Cluster
from foreprop_lab.simulate.connection import Clock, Connection, Loopback, Way
from foreprop_lab.simulate.setting import plan_crowds

LINK = LinkSetting(rate_bits_per_s=80e6, latency_s=0.001, burst_bytes=0, queue_bytes=500_000)
BYTE_S = 1e-7
NO_BOUND = 10**9


class Sender:
    """Sends messages of one size over a connection, as fast as the kernel takes them."""

    def __init__(
        self, cluster: Cluster, here: int, there: int, *, count: int, size_bytes: int, **kernel: int
    ) -> None:
        self.arrived_s: list[float] = []
        self.taken_s: list[float] = []
        self._clock = cluster.clock
        self._size_bytes = size_bytes
        self._left = count
        made = Hosts().kernel(
            cluster.link, connections=2, unsent_bytes=NO_BOUND, buffer_bytes=NO_BOUND
        )
        way = Way(there, self._taken, self._arrive, replace(made, **kernel))
        self.connection = cluster.connect(here, there, way)
        self._send()

    def _send(self) -> None:
        self._left -= 1
        self.connection.send(self._left, self._size_bytes)

    def _taken(self, _: int) -> None:
        self.taken_s.append(self._clock.now_s)
        if self._left:
            self._send()

    def _arrive(self, _: Any) -> None:
        self.arrived_s.append(self._clock.now_s)


def make_cluster(nodes: int = 3, link: LinkSetting = LINK) -> Cluster:
    return Cluster(link, Hosts(), crowds=plan_crowds(nodes, groups=None), open_ports=False)


def run(cluster: Cluster, *senders: Sender, messages: int) -> None:
    cluster.clock.run(lambda: all(len(sender.arrived_s) == messages for sender in senders))


def test_a_lone_connection_has_the_links_rate_less_headers() -> None:
    cluster = make_cluster()
    sender = Sender(cluster, 0, 1, count=20, size_bytes=100_000)
    run(cluster, sender, messages=20)
    ideal_s = 20 * wire_bytes(100_000) * BYTE_S
    assert ideal_s + 2 * LINK.latency_s < sender.arrived_s[-1] < 1.01 * ideal_s + 0.003


def test_connections_with_data_share_a_link_evenly() -> None:
    cluster = make_cluster()
    senders = [Sender(cluster, 0, there, count=20, size_bytes=100_000) for there in (1, 2)]
    run(cluster, *senders, messages=20)
    first, second = (sender.arrived_s[-1] for sender in senders)
    assert second == pytest.approx(first, rel=0.02)
    assert second == pytest.approx(2 * 20 * wire_bytes(100_000) * BYTE_S, rel=0.02)


def test_a_port_is_shared_by_all_that_send_to_its_node() -> None:
    cluster = make_cluster()
    senders = [Sender(cluster, here, 2, count=20, size_bytes=100_000) for here in (0, 1)]
    run(cluster, *senders, messages=20)
    assert max(s.arrived_s[-1] for s in senders) == pytest.approx(
        2 * 20 * wire_bytes(100_000) * BYTE_S, rel=0.02
    )


def test_directions_do_not_disturb_each_other_but_for_acknowledgements() -> None:
    cluster = make_cluster()
    there = Sender(cluster, 0, 1, count=20, size_bytes=100_000)
    back = Sender(cluster, 1, 0, count=20, size_bytes=100_000)
    run(cluster, there, back, messages=20)
    for sender in (there, back):
        assert 1.0 < sender.arrived_s[-1] / (20 * wire_bytes(100_000) * BYTE_S) < 1.06


def test_the_window_bounds_what_is_under_way() -> None:
    """On an idle link, a window of bytes each round trip."""
    cluster = make_cluster()
    window_bytes = 5_792  # two bursts of two packets
    sender = Sender(
        cluster, 0, 1, count=1, size_bytes=100 * window_bytes,
        window_bytes=window_bytes, burst_bytes=window_bytes,
    )  # fmt: skip
    run(cluster, sender, messages=1)
    round_trip_s = 4 * LINK.latency_s + 2 * wire_bytes(window_bytes) * BYTE_S
    assert sender.arrived_s[0] == pytest.approx(100 * round_trip_s, rel=0.02)


def test_the_kernel_takes_no_more_than_it_may_hold() -> None:
    """A message is taken when the one before it has nearly left: priority is decided late."""
    bounds = {"unsent_bytes": 10_000, "buffer_bytes": 20_000, "segment_bytes": 10_000}
    cluster = make_cluster()
    bounded = Sender(cluster, 0, 1, count=10, size_bytes=10_000, **bounds)
    run(cluster, bounded, messages=10)
    for taken_s, arrived_s in zip(bounded.taken_s[4:], bounded.arrived_s, strict=False):
        assert taken_s > arrived_s, "five messages of 10,000 bytes were held at once"
    cluster = make_cluster()
    free = Sender(cluster, 0, 1, count=10, size_bytes=10_000)
    run(cluster, free, messages=10)
    assert max(free.taken_s) == 0.0


def test_a_bucket_lets_pass_what_it_has_saved_up() -> None:
    link = LinkDirection(replace(LINK, burst_bytes=50_000))
    assert link.accept(1.0, 50_000) == 1.0
    assert link.accept(1.0, 10_000) == pytest.approx(1.0 + 10_000 * BYTE_S)
    assert link.accept(1.0 + 2 * 50_000 * BYTE_S, 40_000) <= 1.0 + 2 * 50_000 * BYTE_S


def test_a_node_talks_to_itself_without_a_link() -> None:
    cluster = make_cluster()
    sender = Sender(cluster, 1, 1, count=3, size_bytes=1_000_000)
    assert isinstance(sender.connection, Loopback)
    run(cluster, sender, messages=3)
    assert sender.arrived_s[-1] < 0.1 * wire_bytes(1_000_000) * BYTE_S


def test_acknowledgements_are_free_where_data_goes_back() -> None:
    """Otherwise each is a packet of its own."""
    cluster = make_cluster()
    there = Sender(cluster, 0, 1, count=20, size_bytes=100_000)
    back = Sender(cluster, 1, 0, count=20, size_bytes=100_000)
    assert isinstance(there.connection, Connection)
    assert isinstance(back.connection, Connection)
    there.connection.reverse, back.connection.reverse = back.connection, there.connection
    run(cluster, there, back, messages=20)
    joined_s = there.arrived_s[-1]
    apart = make_cluster()
    senders = [Sender(apart, a, b, count=20, size_bytes=100_000) for a, b in ((0, 1), (1, 0))]
    run(apart, *senders, messages=20)
    assert joined_s < senders[0].arrived_s[-1]


def test_a_deadlock_is_reported() -> None:
    with pytest.raises(InternalError, match="nothing happens any more"):
        Clock().run(lambda: False)


def test_what_is_due_at_once_happens_in_the_order_in_which_it_was_set() -> None:
    clock, seen = Clock(), list[int]()
    for number in range(20):
        clock.at(1.0, seen.append, number)
    clock.at(0.5, seen.append, -1)
    clock.run(lambda: len(seen) == 21)
    assert seen == [-1, *range(20)]
