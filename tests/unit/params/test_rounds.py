"""When gradients leave, and how often they are averaged, from what steps have shown."""

from __future__ import annotations

import pytest

from foreprop.core.wire import MOST_ROUNDS, ROUND_SHIFT
from foreprop.params.averaging import Rounds


def make_step(rounds: Rounds, passes: int, *, discards: int = 0, learning: bool = False) -> int:
    """Make a step of one parameter; the pass in which its gradient may leave (0: in none)."""
    last = 0
    for number in range(1, passes + 1):
        rounds.note_pass(number)
        if rounds.is_last_pass:
            last = number
    rounds.end_step(discards, learning=learning)
    return last


def test_one_pass_is_expected_in_the_first_step() -> None:
    rounds = Rounds()
    assert make_step(rounds, 2, learning=True) == 1  # too early: another round follows
    assert make_step(rounds, 2) == 2


def test_more_passes_are_expected_at_once_and_fewer_when_two_steps_agree() -> None:
    rounds = Rounds()
    make_step(rounds, 2, learning=True)
    assert make_step(rounds, 3) == 2  # too early: another round follows
    assert make_step(rounds, 3) == 3
    assert make_step(rounds, 1) == 0
    assert make_step(rounds, 3) == 3  # an epoch's last step says nothing of the next ones
    assert make_step(rounds, 1) == 0
    assert make_step(rounds, 1) == 0
    assert make_step(rounds, 1) == 1


def test_passes_that_are_discarded_are_counted_too() -> None:
    rounds = Rounds()
    make_step(rounds, 3, discards=2, learning=True)
    assert make_step(rounds, 3) == 3


def test_a_fixed_number_is_not_unlearned() -> None:
    rounds = Rounds(fixed_passes=2)
    make_step(rounds, 1, learning=True)
    assert [make_step(rounds, passes) for passes in (1, 1, 3, 2)] == [0, 0, 2, 2]


def test_the_passes_are_those_of_the_parameter_that_had_most() -> None:
    rounds = Rounds(fixed_passes=2)
    make_step(rounds, 2, learning=True)
    for passes in (1, 2, 1):
        rounds.note_pass(passes)
    assert rounds.is_last_pass


def test_a_step_without_a_backward_pass_teaches_nothing() -> None:
    rounds = Rounds()
    make_step(rounds, 2, learning=True)
    assert make_step(rounds, 0) == 0
    assert make_step(rounds, 2) == 2


@pytest.mark.parametrize("counts_rounds", [False, True])
def test_every_round_has_another_name(counts_rounds: bool) -> None:
    """Servers tell rounds by step and number, collectives by the step alone."""
    rounds = Rounds(counts_rounds=counts_rounds)
    names = [(rounds.step, rounds.flags >> ROUND_SHIFT)]
    for number in range(3 * MOST_ROUNDS):
        if number % (2 * MOST_ROUNDS) == MOST_ROUNDS + 1:
            rounds.end_step(0, learning=False)
        else:
            rounds.begin_again()
        names.append((rounds.step, rounds.flags >> ROUND_SHIFT))
        assert rounds.serial == len(names)
    assert names == sorted(set(names))
    assert all(again < MOST_ROUNDS for _, again in names)
    if counts_rounds:
        assert [step for step, _ in names] == list(range(1, len(names) + 1))
