"""lab/src/foreprop_lab/benchmarks/tcpshares.py on real links."""

from __future__ import annotations

import pytest

from foreprop_lab.benchmarks.tcpshares import main

pytestmark = [pytest.mark.process, pytest.mark.lab, pytest.mark.long]


def test_all_bytes_arrive_and_links_are_no_faster_than_they_are() -> None:
    options = "--nodes 2 --rate 40Mbit --size 0.5 --rounds 2 --pauses 0"
    (shares,) = main(options.split())
    assert len(shares.last) == 2
    assert min(shares.last) > 0.5  # of what the rate allows; a bucket's burst is for free
    assert shares.spread == 0.0  # one connection each way
