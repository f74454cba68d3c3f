"""Which two steps the demo's report shows."""

from __future__ import annotations

from foreprop_lab.demo.training import typical_step

FIRST = 13  # the first measured step: the first block of 12 only warms up


def test_of_equal_steps_the_first_inside_of_a_block_is_shown() -> None:
    assert typical_step([1.0] * 24) == FIRST + 1


def test_two_steps_near_the_median_are_shown() -> None:
    step_s = [*[1.0, 9.0] * 6, *[1.0, 9.0] * 2, 4.9, 5.1, *[1.0, 9.0] * 3]
    assert typical_step(step_s) == FIRST + 16


def test_the_ends_of_a_block_are_not_shown() -> None:
    step_s = [5.0, 5.0, *[1.0, 9.0] * 4, 5.0, 5.0, *[9.0] * 4, 5.1, 5.1, *[1.0] * 6]
    assert typical_step(step_s) == FIRST + 16


def test_the_fewest_steps_are_enough() -> None:
    assert typical_step([1.0] * 20) == FIRST + 1
