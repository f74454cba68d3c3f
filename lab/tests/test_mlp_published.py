"""Formulas 7 to 21 as they are printed, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreprop.errors import ConfigError
from foreprop_lab.experiments.mlp import published
from foreprop_lab.experiments.mlp.published import Symbols

# 60,000 examples, batches of 100, 4 workers, 2 servers, 8 Mbit at 100 Mbit/s
MNIST = Symbols(
    n=60_000, b=100, w=4, ps=2, W=8e6, B=100e6, processing_s=0.3, update_s=0.01, epoch=2
)


def test_formula_7_adds_the_three_passes() -> None:
    assert published.processing_s(0.1, 0.02, 0.2) == pytest.approx(0.32)


def test_formulas_8_to_13_by_hand() -> None:
    assert published.available_bandwidth_ps(MNIST) == pytest.approx(50e6)
    assert published.pull_s(MNIST) == pytest.approx(2 * 0.16 * 600)
    assert published.push_s(MNIST) == pytest.approx(2 * 0.04 * 600)
    assert published.cpu_ps_s(MNIST) == pytest.approx(2 * 600 * 0.31)
    assert published.tcp_ps_s(MNIST) == pytest.approx(192 + 48)
    assert published.total_ps_s(MNIST) == pytest.approx(192 + 48 + 372)


def test_formula_14_is_larger_on_a_slower_machine() -> None:
    """Samples per second could not be: it is printed as a product."""
    assert published.ideal(0.5, MNIST) == pytest.approx(0.5 * 60_000 * 4)
    assert published.ideal(1.0, MNIST) > published.ideal(0.5, MNIST)


def test_formulas_15_to_18_by_hand() -> None:
    assert published.cpu_p2p_s(MNIST) == pytest.approx(2 * 15_000 * 0.31)
    assert published.available_bandwidth_p2p(MNIST) == pytest.approx(100e6 / 6)
    assert published.tcp_p2p_s(MNIST) == pytest.approx(0.48 * 15_000)
    assert published.total_p2p_s(MNIST) == pytest.approx(9_300 + 7_200)


def test_formulas_19_to_21_by_hand() -> None:
    assert published.cpu_ring_s(MNIST) == pytest.approx(9_300)
    assert published.tcp_ring_s(MNIST) == pytest.approx(2 * 3 * 2e6 / 100e6)
    assert published.total_ring_s(MNIST) == pytest.approx(9_300.12)


def test_peers_take_n_times_a_ring_though_their_links_carry_the_same() -> None:
    """Formula 17 is n times formula 20; the text has 2 (w - 1) messages of W / w in both."""
    assert published.tcp_p2p_s(MNIST) == pytest.approx(MNIST.n * published.tcp_ring_s(MNIST))


def test_a_ring_communicates_once_however_many_epochs() -> None:
    assert published.tcp_ring_s(replace(MNIST, epoch=100)) == published.tcp_ring_s(MNIST)
    assert published.tcp_p2p_s(replace(MNIST, epoch=100)) == published.tcp_p2p_s(MNIST)
    assert published.tcp_ps_s(replace(MNIST, epoch=4)) == 2 * published.tcp_ps_s(MNIST)


def test_pushes_shrink_with_the_workers_though_gradients_do_not() -> None:
    for w in (1, 2, 7):
        s = replace(MNIST, w=w)
        assert published.pull_s(s) == pytest.approx(w * published.push_s(s))


def test_computing_with_servers_does_not_shrink_with_the_workers_but_with_peers_it_does() -> None:
    more = replace(MNIST, w=7)
    assert published.cpu_ps_s(more) == published.cpu_ps_s(MNIST)
    assert published.cpu_p2p_s(more) == pytest.approx(4 / 7 * published.cpu_p2p_s(MNIST))


def test_more_servers_than_workers_give_a_worker_more_than_its_link() -> None:
    assert published.available_bandwidth_ps(replace(MNIST, w=1, ps=4)) == 4 * MNIST.B


def test_one_worker_has_no_peers() -> None:
    with pytest.raises(ConfigError, match="w is 1; formula 16 divides by w - 1"):
        published.tcp_p2p_s(replace(MNIST, w=1))


@pytest.mark.parametrize("name", ["n", "b", "w", "ps", "W", "B", "epoch", "processing_s"])
def test_what_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1; it must be"):
        replace(MNIST, **{name: -1})  # type: ignore[arg-type]
