"""Simulated all-reduce, and what is built on it, beside closed forms."""

from __future__ import annotations

import pytest

from foreprop.plan.limit import BYTES_PER_ELEM
from foreprop.plan.refined import fill_buckets
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.links import LinkSetting, wire_bytes
from foreprop_lab.simulate.cluster import Cluster
from foreprop_lab.simulate.collective import Ring
from foreprop_lab.simulate.setting import plan_crowds

RATE = 80e6
LINK = LinkSetting(rate_bits_per_s=RATE, latency_s=10e-6, burst_bytes=0, queue_bytes=500_000)


def reduce(nodes: int, elems: int, *, late_s: float = 0.0) -> list[float]:
    """When each rank has the sum; the last one issues its part ``late_s`` after the others."""
    cluster = Cluster(LINK, Hosts(), crowds=plan_crowds(nodes, groups=None), open_ports=False)
    ring = Ring(cluster, buffer_bytes=200_000)
    done_s: dict[int, float] = {}

    def issue(rank: int) -> None:
        ring.issue(rank, "sum", elems, lambda: done_s.update({rank: cluster.clock.now_s}))

    for rank in cluster.ranks:
        cluster.clock.at(late_s if rank == nodes - 1 else 0.0, issue, rank)
    cluster.clock.run(lambda: len(done_s) == nodes)
    return [done_s[rank] for rank in cluster.ranks]


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_a_ring_moves_each_byte_twice_but_for_its_own_share(nodes: int) -> None:
    """2 (N - 1) / N W / B (Patarasuk and Yuan, section 3)."""
    elems = 2_400_000
    size_bytes = wire_bytes(elems * BYTES_PER_ELEM)
    ideal_s = 2 * (nodes - 1) / nodes * size_bytes * 8 / RATE
    for done_s in reduce(nodes, elems):
        assert ideal_s < done_s < 1.03 * ideal_s


def test_all_workers_wait_for_the_last_one() -> None:
    on_time, late = reduce(4, 240_000), reduce(4, 240_000, late_s=1.0)
    assert min(late) > 1.0
    assert max(late) < 1.0 + max(on_time)


def test_latency_counts_once_for_each_pass() -> None:
    """Of next to nothing: 2 (N - 1) times two links and a host."""
    passes = 2 * 3
    least_s = passes * (2 * LINK.latency_s + Hosts().receive_s)
    assert least_s < max(reduce(4, 1)) < 1.3 * least_s


def test_buckets_are_filled_from_the_last_array_on() -> None:
    assert fill_buckets([10, 20, 30, 5], 100) == [[3, 2], [1, 0]]
    assert fill_buckets([10, 20, 30, 5], 1) == [[3], [2], [1], [0]]
    assert fill_buckets([10, 20, 30, 5], 10**6) == [[3, 2, 1, 0]]
