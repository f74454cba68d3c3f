"""The yardstick for many nodes, on links that the kernel makes."""

from __future__ import annotations

import pytest

from foreprop.errors import ConfigError
from foreprop_lab.benchmarks.exchange import Exchange, measure_exchange

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.alone, pytest.mark.lab]


def test_every_node_sends_to_every_other_one_at_the_links_rate() -> None:
    exchange = Exchange(nodes=3, rate_bits_per_s=50e6, node_bytes=2_000_000, message_bytes=12_500)
    try:
        seconds = measure_exchange(exchange, rounds=3)
    except ConfigError as error:
        pytest.skip(str(error))
    assert exchange.ideal_s == pytest.approx(0.32 * 1514 / 1448, rel=1e-3)
    assert 0.85 * exchange.ideal_s < seconds < 3 * exchange.ideal_s
