"""The optimizer's numbers of ranks in different steps: alike, whoever says them first."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.staleness.ownnumbers import NumbersApart

STEPS = 6


def rate(value: float) -> tuple[dict[str, Any], ...]:
    return ({"lr": value},)


@settings(max_examples=100, deadline=None)
@given(
    changes=st.lists(st.integers(2, STEPS), max_size=4, unique=True).map(sorted),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_each_rank_goes_by_its_own_step_in_any_order(
    changes: list[int], ranks: int, seed: int
) -> None:
    numbers, rng = NumbersApart(ranks), random.Random(seed)
    schedule = [1, *changes]
    made = [0] * ranks
    while min(made) < STEPS:
        rank = rng.choice([each for each in range(ranks) if made[each] < STEPS])
        step = made[rank] = made[rank] + 1
        if step in schedule:
            numbers.announce(rank, step, rate(float(step)))
        expected = max(each for each in schedule if each <= step)
        assert numbers.at(rank, step) == rate(float(expected))
        if step > 1:  # a slice of the step before may be updated later
            before = max(each for each in schedule if each <= step - 1)
            assert numbers.at(rank, step - 1) == rate(float(before))
    assert len(numbers._said) <= 3


def apart() -> NumbersApart:
    numbers = NumbersApart(2)
    for rank in (0, 1):
        numbers.announce(rank, 1, rate(0.1))
    return numbers


def test_other_numbers_before_the_same_step_are_told() -> None:
    numbers = apart()
    numbers.announce(0, 3, rate(0.2))
    with pytest.raises(TrainingLoopError, match=r"step 3: lr .* is 0.2 on rank 0 and 0.3 on rank"):
        numbers.announce(1, 3, rate(0.3))


def test_the_same_numbers_before_other_steps_are_told() -> None:
    numbers = apart()
    numbers.announce(0, 3, rate(0.2))
    with pytest.raises(TrainingLoopError, match=r"rank 1 changed .* before step 4, and rank 0 bef"):
        numbers.announce(1, 4, rate(0.2))


def test_who_does_not_change_them_is_told_whether_before_or_after() -> None:
    numbers = apart()
    numbers.announce(0, 3, rate(0.2))
    assert numbers.at(1, 2) == rate(0.1)
    with pytest.raises(TrainingLoopError, match=r"rank 0 changed .* step 3, and rank 1 has not"):
        numbers.at(1, 3)
    numbers = apart()
    assert numbers.at(0, 5) == rate(0.1)
    with pytest.raises(TrainingLoopError, match=r"rank 1 changed .* step 4, and rank 0 has not"):
        numbers.announce(1, 4, rate(0.2))


def test_a_push_without_numbers_breaks_the_protocol() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 1 pushed before it sent hyperparameters"):
        NumbersApart(2).at(1, 1)
