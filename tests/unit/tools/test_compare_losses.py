"""Whether two systems have the same losses."""

from __future__ import annotations

import pytest

from foreprop.tools.compare.result import difference_of, largest_of, losses_text


def test_the_same_losses_are_equal() -> None:
    losses = [[2.0, 1.5, None], [2.0, 1.25, None]]
    found = difference_of(losses, losses)
    assert found is not None
    assert (found.largest, found.first_step) == (0, None)
    assert losses_text(found) == "equal"


def test_a_difference_is_a_share_of_the_usual_loss_and_has_its_first_step() -> None:
    found = difference_of([[2.0, 2.0, 2.001], [2.0, 2.0, 2.0]], [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]])
    assert found is not None
    assert found.largest == pytest.approx(0.0005)
    assert found.first_step == 3
    assert losses_text(found) == "agree (5e-04)"


def test_a_larger_difference_is_reported_with_its_step() -> None:
    found = difference_of([[2.0, 2.5]], [[2.0, 2.0]])
    assert losses_text(found) == "differ (2e-01, from step 2)"


def test_another_first_loss_is_another_draw() -> None:
    """Before the first update no system can matter."""
    found = difference_of([[2.1, 2.0]], [[2.0, 2.0]])
    assert found is not None
    assert found.is_other_draw
    assert losses_text(found) == "other draws"


def test_a_loss_that_is_no_number_on_one_side_only_differs() -> None:
    assert losses_text(difference_of([[1.0, None]], [[1.0, 1.0]])) == "differ (inf, from step 2)"


def test_steps_that_only_one_has_do_not_count() -> None:
    assert losses_text(difference_of([[1.0, 0.5, 0.1]], [[1.0, 0.5]])) == "equal"


def test_without_losses_nothing_is_claimed() -> None:
    assert losses_text(difference_of([[None, None]], [[None, None]])) == "none seen"
    assert losses_text(difference_of([[]], [[]])) == "none seen"
    assert losses_text(difference_of([[1.0]], [[1.0], [1.0]])) == "none seen"


def test_the_largest_difference_counts_and_other_draws_before_it() -> None:
    small, large = (
        difference_of([[1.0, 1.1]], [[1.0, 1.0]]),
        difference_of([[1.0, 9.0]], [[1.0, 1.0]]),
    )
    drawn = difference_of([[1.1, 1.0]], [[1.0, 1.0]])
    assert largest_of([small, None, large]) is large
    assert largest_of([large, drawn]) is drawn
    assert largest_of([None]) is None
