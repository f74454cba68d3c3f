"""A new order of first use counts once it has been seen often enough in a row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreprop.session.useorder import OrderWatch


def test_the_order_as_it_is_never_changes() -> None:
    watch = OrderWatch([2, 0, 1])
    assert [watch.observe([2, 0, 1]) for _ in range(9)] == [None] * 9


def test_a_change_for_good_is_taken_over_once() -> None:
    watch = OrderWatch([0, 1, 2])
    told = [watch.observe([2, 1, 0]) for _ in range(6)]
    assert told == [None, None, (2, 1, 0), None, None, None]


def test_a_path_that_alternates_keeps_the_order() -> None:
    watch = OrderWatch([0, 1, 2])
    assert [watch.observe([2, 1, 0] if n % 2 else [0, 1, 2]) for n in range(12)] == [None] * 12


def test_unused_parameters_come_last_in_their_order() -> None:
    watch = OrderWatch([0, 1, 2, 3])
    told = [watch.observe([3, 1]) for _ in range(3)]
    assert told[-1] == (3, 1, 0, 2)


def test_part_of_the_same_order_changes_nothing() -> None:
    watch = OrderWatch([0, 1, 2, 3])
    assert [watch.observe([1, 3]) for _ in range(5)] == [None] * 5


def test_steps_that_show_nothing_do_not_count() -> None:
    watch = OrderWatch([0, 1])
    told = [watch.observe(used) for used in ([1, 0], [], [1, 0], [], [1, 0])]
    assert told == [None, None, None, None, (1, 0)]


@given(st.permutations(range(6)), st.lists(st.permutations(range(6)), max_size=30))
def test_it_is_always_an_order_of_all(first: list[int], seen: list[list[int]]) -> None:
    watch = OrderWatch(first)
    for number, used in enumerate(seen):
        told = watch.observe(used[: number % 7])
        assert told is None or sorted(told) == list(range(6))
