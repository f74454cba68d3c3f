"""foreprop_lab.benchmarks.tcpshares, simulated; its measurement is in test_tcpshares_run.py."""

from __future__ import annotations

import statistics

import pytest

from foreprop_lab.benchmarks.tcpshares import main
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.links import Network
from foreprop_lab.simulate.cluster import lab_link

ROUNDS = "--rounds 6 --size 0.4 --pauses 0,1 --rate 38.3Mbit --spread".split()


def test_windows_that_differ_make_connections_end_apart(capsys: pytest.CaptureFixture[str]) -> None:
    even, uneven = (main([*ROUNDS, spread]) for spread in ("0", "0.5"))
    for alike, apart in zip(even, uneven, strict=True):
        assert alike.spread < 0.03 < apart.spread
        assert statistics.median(alike.last) < statistics.median(apart.last)
    assert main([*ROUNDS, "0.5"]) == uneven
    assert "rates differ by" in capsys.readouterr().out


@pytest.mark.parametrize(("share", "expected"), [(1.0, 0.0), (1.8, 0.15), (2.3, 0.3), (9.0, 0.3)])
def test_shares_are_even_until_senders_hold_more_than_the_queue(
    share: float, expected: float
) -> None:
    link = lab_link(Network(nodes=4, rate_bits_per_s=40e6), latency_s=1e-4)
    hosts = Hosts(window_spread=0.3)
    held_bytes = share * link.queue_bytes / hosts.buffer_share
    assert hosts.spread_of(link, held_bytes) == pytest.approx(expected)
    assert Hosts().spread_of(link, held_bytes) == 0.0
