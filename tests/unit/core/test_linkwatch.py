"""Links are measured again, and slices move, but for nothing that passes by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.lateness import Cause, Straggler
from foreprop.core.linkshares import (
    WHOLE,
    LinkWatch,
    as_setting,
    describe_move,
    is_worth_moving,
    rates_on,
    shares_of,
)

PAUSE_S = 10.0


def late(rank: int, cause: Cause = "link") -> Straggler:
    return Straggler(rank=rank, late_s=0.5, since_step=1, cause=cause)


def observe(watch: LinkWatch, *told: Straggler | None, begin_s: float = 0.0) -> list[bool]:
    """A window each second, after a pause."""
    watch.observe(None, begin_s)
    return [watch.observe(each, begin_s + PAUSE_S + n) for n, each in enumerate(told)]


def even() -> LinkWatch:
    return LinkWatch(pause_s=PAUSE_S, uneven=False)


def test_a_link_that_stays_slow_is_measured_once() -> None:
    assert observe(even(), *[late(2)] * 9) == [False] * 3 + [True] + [False] * 5


@pytest.mark.parametrize("between", [None, late(1), late(2, "compute"), late(2, "server")], ids=str)
def test_what_passes_by_itself_counts_from_the_beginning(between: Straggler | None) -> None:
    told = observe(even(), *[late(2)] * 3, between, *[late(2)] * 4)
    assert told == [False] * 7 + [True]


@given(st.lists(st.sampled_from([None, late(1, "compute"), late(2, "server")]), max_size=40))
def test_where_no_link_is_slow_nothing_is_measured(told: list[Straggler | None]) -> None:
    assert not any(observe(even(), *told))


def test_unlike_shares_are_looked_at_though_nobody_is_late() -> None:
    watch = LinkWatch(pause_s=PAUSE_S, uneven=True)
    assert [watch.observe(None, at) for at in (0.0, 9.9, 10.0, 30.0)] == [False, False, True, False]
    watch.measured(31.0, moved=True, uneven=False)
    assert not any(watch.observe(None, at) for at in (41.0, 60.0, 1000.0))


def test_pauses_double_until_something_moves() -> None:
    watch, now_s, pauses = LinkWatch(pause_s=PAUSE_S, uneven=True), 0.0, []
    watch.observe(None, now_s)
    for moved in [False] * 6 + [True, False]:
        since_s = now_s
        while not watch.observe(None, now_s):
            now_s += 1
        pauses.append(now_s - since_s)
        watch.measured(now_s, moved=moved, uneven=True)
    assert pauses == [10, 20, 40, 80, 160, 160, 160, 10]


def test_how_much_slower_a_link_must_be() -> None:
    even_shares = shares_of([1, 1, 1, 1])
    assert is_worth_moving([1, 1, 1, 0.5], even_shares)
    assert not is_worth_moving([1, 1, 1, 1], even_shares)
    assert not is_worth_moving([1, 1, 1, 0.97], even_shares)
    assert is_worth_moving([1, 1, 1, 1], shares_of([1, 1, 1, 0.5]))  # and back


@given(st.lists(st.floats(0.2, 1.0), min_size=3, max_size=8))
def test_what_has_moved_stays_while_rates_do(rates: list[float]) -> None:
    assert not is_worth_moving(rates, shares_of(rates))


def test_a_move_is_told_by_who_changed() -> None:
    assert describe_move([1, 1, 1, 1], [1, 1, 1, 0.7], step=41) == [
        "from step 41 node 3's server owns 7% instead of 25%: its link has 0.7 of the fastest"
        " one's rate"
    ]
    assert describe_move([1, 0.5, 1, 1], [1, 1, 1, 1], step=9) == [
        "from step 9 node 1's server owns 25% instead of 0%: its link is as fast as any"
    ]


@given(st.lists(st.sampled_from([0.25, 0.5, 0.85, 1.0]), min_size=3, max_size=6))
def test_rates_become_a_setting_and_rates_again(rates: list[float]) -> None:
    assert rates_on(len(rates), as_setting(rates)) == rates
    assert sum(shares_of(rates)) == pytest.approx(WHOLE, abs=len(rates))
