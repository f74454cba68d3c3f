"""Shares of servers where links differ: what is asked, and how soon the slowest is ready."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foreprop.config import Config
from foreprop.core.linkshares import (
    WHOLE,
    late_nodes_of,
    parse_late_nodes,
    parse_node_rates,
    plan_shares,
    ready_in,
    shares_of,
    spare,
)
from foreprop.core.slicing import Partition, deal, plan_slices, usual_slice_elems
from foreprop.errors import ConfigError

RATES = st.lists(st.floats(0.1, 1.0), min_size=3, max_size=9)


@given(RATES, st.data())
def test_no_other_shares_are_ready_sooner(rates: list[float], data: st.DataObject) -> None:
    shares = shares_of(rates)
    assert abs(sum(shares) - WHOLE) <= len(rates)
    others = data.draw(st.lists(st.floats(0, 1), min_size=len(rates), max_size=len(rates)))
    if sum(others) > 0.01:
        assert ready_in(rates, shares) <= ready_in(rates, others) * 1.01


@given(RATES)
def test_a_slower_link_never_owns_more(rates: list[float]) -> None:
    shares = shares_of(rates)
    ordered = [share for _, share in sorted(zip(rates, shares, strict=True))]
    assert ordered == sorted(ordered)


def test_equal_links_own_as_much_and_nothing_changes() -> None:
    assert shares_of([0.5] * 4) == [WHOLE // 4] * 4
    assert plan_shares("3:1", servers=4, per_node=1) == ()
    assert plan_shares("1:0.5", servers=2, per_node=1) == ()  # of two nodes no share helps


def test_a_link_of_half_the_rate_owns_nothing_of_four() -> None:
    assert plan_shares("3:0.5", servers=4, per_node=1) == (3333, 3333, 3333, 0)


@pytest.mark.parametrize("text", ["", "3", "3:0", "3:-1", "x:1", "3:nan", "1:0.5,1:0.6"])
def test_what_is_no_rate_of_a_node_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="node_rates has"):
        parse_node_rates(text)


def test_nodes_that_are_not_there_are_told() -> None:
    with pytest.raises(ConfigError, match="node_rates has node 4; there are 0 to 3"):
        Config(node_rates="4:0.5").knobs(4)


@pytest.mark.parametrize("other", [{"dedicated_servers": 2}, {"placement": "kvstore"}])
def test_servers_must_be_beside_the_workers(other: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"node_rates is '3:0\.5'"):
        Config(node_rates="3:0.5", **other)  # type: ignore[arg-type]


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=200),
    shares=st.lists(st.integers(0, 100), min_size=1, max_size=6).filter(any),
)
@example(sizes=[26, 29], shares=[2, 13, 13, 25])
def test_loads_follow_the_shares_to_within_a_few_pieces(
    sizes: list[int], shares: list[int]
) -> None:
    """The server that takes a piece is then no further ahead of its share than another would be."""
    chosen, able = deal(sizes, shares), sum(share > 0 for share in shares)
    for server, share in enumerate(shares):
        load = sum(s for s, c in zip(sizes, chosen, strict=True) if c == server)
        assert load == 0 or share > 0
        most = sum(sizes) + (able - 1) * max(sizes)
        assert load * sum(shares) <= share * most


def test_slices_with_shares_cover_every_element_once() -> None:
    config = Config(node_rates="2:0.6")
    knobs = config.knobs(3)
    assert knobs.slice_elems == usual_slice_elems(3, uneven=True) == 25_000
    assert Config().knobs(3).slice_elems == 50_000
    partition = Partition(servers=3, slice_elems=knobs.slice_elems, shares=knobs.shares)
    pieces = plan_slices([130_000, 70_000], [4, 4], partition)
    assert sum(piece.elems for piece in pieces) == 200_000
    of_last = sum(piece.elems for piece in pieces if piece.server == 2)
    assert of_last < 200_000 / 3


def test_the_order_of_two_equal_shares_is_the_usual_one() -> None:
    """Equal shares deal as none do: a plan that finds links alike changes nothing."""
    sizes = [7, 7, 3, 9, 1, 7, 7]
    usual = plan_slices(sizes, [4] * 7, Partition(servers=3, slice_elems=100))
    assert deal([size * 4 for size in sizes], [1, 1, 1]) == [piece.server for piece in usual]


# Nodes that compute for longer.
def test_a_late_nodes_server_owns_half_as_much() -> None:
    assert spare([2500] * 4, [3]) == [2917, 2917, 2917, 1250]
    assert plan_shares(None, servers=8, per_node=2, late="3") == (2917,) * 6 + (1250,) * 2
    assert plan_shares("0:0.5", servers=4, per_node=1, late="3") == (0, 4166, 4166, 1666)


@given(
    st.lists(st.integers(0, WHOLE), min_size=3, max_size=8).filter(any), st.sets(st.integers(0, 7))
)
def test_sparing_gives_away_no_more_and_no_less_than_there_is(
    shares: list[int], late: set[int]
) -> None:
    spared = spare(shares, late)
    assert sum(spared) == pytest.approx(sum(shares), abs=len(shares))
    if spared != shares:
        assert all(spared[n] <= shares[n] / 2 + 1 for n in range(len(shares)) if n in late)
        assert all(spared[n] >= shares[n] for n in range(len(shares)) if n not in late)


def test_where_sparing_changes_nothing() -> None:
    assert spare([5000, 5000], [1]) == [5000, 5000]
    assert spare([3000, 3000, 4000], [0, 1, 2]) == [3000, 3000, 4000]
    assert plan_shares(None, servers=2, per_node=1, late="1") == ()


LATE: dict[str, Any] = {"compute_s": [1.0, 1.0, 1.0, 1.5], "rates": [1.0] * 4}


def test_who_is_late_if_there_is_something_to_gain() -> None:
    """Simulated: Sockeye with a slow node gains, at balance 1.0 and at 1.5 (a model in 0.7 s and
    1.05 s); ResNet-50 does not, at neither."""
    assert late_nodes_of(**LATE, model_s=0.7, step_s=1.9) == (3,)
    assert late_nodes_of(**LATE, model_s=1.05, step_s=2.2) == (3,)
    assert late_nodes_of(**LATE, model_s=0.7, step_s=1.51) == ()  # compute is all there is
    assert late_nodes_of(**LATE, model_s=1.05, step_s=1.64) == ()  # the others would be late
    nearly = [1.0, 1.05, 1.1, 1.14]
    assert late_nodes_of(nearly, [1.0] * 4, model_s=0.7, step_s=1.9) == ()


def test_a_slow_link_is_reckoned_with() -> None:
    late = {"compute_s": LATE["compute_s"], "model_s": 0.7}
    rates = [0.4, 1.0, 1.0, 1.0]
    assert late_nodes_of(rates=rates, step_s=1.8, **late) == ()  # it needs 1.75 s for its pushes
    assert late_nodes_of(rates=rates, step_s=1.9, **late) == (3,)


@pytest.mark.parametrize("text", ["", "x", "3,3", "-1", "3:0.5", "1,,2"])
def test_what_is_no_late_node_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="late_nodes has"):
        parse_late_nodes(text)


def test_late_nodes_that_are_not_there_are_told() -> None:
    with pytest.raises(ConfigError, match="late_nodes has node 4; there are 0 to 3"):
        Config(late_nodes="4").knobs(4)
    with pytest.raises(ConfigError, match="late_nodes is '3': these have servers beside"):
        Config(late_nodes="3", dedicated_servers=2)
