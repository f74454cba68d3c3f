"""The optimizer's numbers: of ranks in one step, of those that count, and of ranks apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.manifest import SCALE
from foreprop.engine.hyperparameters import HyperparameterHistory
from foreprop.errors import RemoteProtocolError, TrainingLoopError

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
    numbers, rng = HyperparameterHistory(range(ranks), apart=True), random.Random(seed)
    schedule = [1, *changes]
    made = [0] * ranks
    while min(made) < STEPS:
        rank = rng.choice([each for each in range(ranks) if made[each] < STEPS])
        step = made[rank] = made[rank] + 1
        if step in schedule:
            numbers.announce(rank, step, rate(float(step)))
        expected = max(each for each in schedule if each <= step)
        assert numbers.at(step, (rank,)) == rate(float(expected))
        if step > 1:  # a slice of the step before may be updated later
            before = max(each for each in schedule if each <= step - 1)
            assert numbers.at(step - 1, (rank,)) == rate(float(before))
    for rank in range(ranks):
        numbers.announce(rank, STEPS + 1, rate(0.0))
    assert max(map(len, numbers._announced)) <= 5


def apart() -> HyperparameterHistory:
    numbers = HyperparameterHistory(range(2), apart=True)
    for rank in (0, 1):
        numbers.announce(rank, 1, rate(0.1))
    return numbers


def test_each_rank_apart_has_a_scale_of_its_own() -> None:
    numbers = HyperparameterHistory(range(2), apart=True)
    for rank in (0, 1):
        numbers.announce(rank, 1, (*rate(0.1), {SCALE: 2.0 ** (8 - rank)}))
    assert numbers.at(1, (0,))[-1] == {SCALE: 256.0}
    assert numbers.at(1, (1,))[-1] == {SCALE: 128.0}
    numbers.announce(1, 2, (*rate(0.3), {SCALE: 128.0}))
    numbers.announce(0, 2, (*rate(0.2), {SCALE: 128.0}))
    with pytest.raises(TrainingLoopError, match=r"lr .* is 0.2 on rank 0 and 0.3 on rank 1"):
        numbers.at(2, (1,))


def test_other_numbers_before_the_same_step_are_told() -> None:
    numbers = apart()
    numbers.announce(0, 3, rate(0.2))
    numbers.announce(1, 3, rate(0.3))
    with pytest.raises(TrainingLoopError, match=r"step 3: lr .* is 0.2 on rank 0 and 0.3 on rank"):
        numbers.at(3, (1,))


def test_the_same_numbers_before_other_steps_are_told() -> None:
    numbers = apart()
    numbers.announce(0, 3, rate(0.2))
    numbers.announce(1, 4, rate(0.2))
    with pytest.raises(TrainingLoopError, match=r"step 3: lr .* is 0.2 on rank 0 and 0.1 on rank"):
        numbers.at(3, (1,))


def test_who_does_not_change_them_is_told_whether_before_or_after() -> None:
    numbers = apart()
    numbers.announce(0, 3, rate(0.2))
    assert numbers.at(2, (1,)) == rate(0.1)
    with pytest.raises(TrainingLoopError, match=r"step 3: lr .* is 0.2 on rank 0 and 0.1 on rank"):
        numbers.at(3, (1,))
    numbers = apart()
    assert numbers.at(5, (0,)) == rate(0.1)
    numbers.announce(1, 4, rate(0.2))
    with pytest.raises(TrainingLoopError, match=r"step 4: lr .* is 0.1 on rank 0 and 0.2 on rank"):
        numbers.at(4, (1,))


def test_a_push_without_numbers_breaks_the_protocol() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 1 pushed before it sent hyperparameters"):
        HyperparameterHistory(range(2), apart=True).at(1, (1,))


def test_ranks_in_one_step_agree_whoever_has_a_gradient() -> None:
    numbers = HyperparameterHistory([0, 2])
    numbers.announce(0, 1, rate(0.1))
    with pytest.raises(RemoteProtocolError, match="rank 2 pushed before it sent hyperparameters"):
        numbers.at(1, (0,))
    numbers.announce(1, 1, rate(0.1))
    assert numbers.at(1, (0,)) == rate(0.1)
    numbers.announce(1, 2, rate(0.2))
    with pytest.raises(TrainingLoopError, match=r"step 2: lr .* is 0.1 on rank 0 and 0.2"):
        numbers.at(2, (0,))


def test_those_that_count_agree_and_a_newcomer_that_does_not_is_named() -> None:
    numbers = HyperparameterHistory(range(3), newcomers={0})
    for rank, value in enumerate((0.3, 0.1, 0.2)):
        numbers.announce(rank, 1, rate(value))
    assert numbers.at(1, (0, 1)) == rate(0.1)
    assert list(numbers.unlike) == [0]
    assert "lr of parameter group 0 is 0.1 on rank 1 and 0.3 on rank 0" in numbers.unlike[0]
    with pytest.raises(TrainingLoopError, match=r"on rank 1 and 0.2 on rank 2"):
        numbers.at(1, (1, 2))
