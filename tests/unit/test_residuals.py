"""What codecs keep of a slice counts when its round does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreprop.compression.residuals import OF_AVERAGES, Kept, divided


def kept_of(value: float = 0.0, scale: float = 1.0) -> Kept:
    return Kept({"error": torch.full((2,), value)}, scale)


def try_round(kept: Kept, round_: tuple[int, int], adds: float, *, scale: float = 1.0) -> None:
    """An encoding that leaves out so much more than it begins with."""
    kept.follow(round_, scale)
    kept.begin(round_)["error"].add_(adds)


def error_before(kept: Kept, step: int, scale: float = 1.0) -> float:
    (value,) = set(kept.before(step, scale)["error"].tolist())
    return float(value)


def test_a_round_counts_when_a_later_step_begins() -> None:
    kept = kept_of()
    try_round(kept, (1, 0), 3.0)
    assert (error_before(kept, 1), error_before(kept, 2)) == (0.0, 3.0)
    try_round(kept, (2, 0), 4.0)
    assert (error_before(kept, 2), error_before(kept, 3)) == (3.0, 7.0)


def test_another_round_of_the_step_begins_where_the_last_one_did() -> None:
    kept = kept_of()
    try_round(kept, (1, 0), 3.0)
    try_round(kept, (1, 1), 4.0)
    kept.follow((1, 2), 1.0)  # without a gradient
    assert error_before(kept, 2) == 0.0
    try_round(kept, (2, 0), 5.0)
    assert error_before(kept, 3) == 5.0


def test_encoded_once_more_it_begins_where_it_did() -> None:
    kept = kept_of(2.0)
    try_round(kept, (1, 0), 3.0)
    try_round(kept, (1, 0), 3.0)
    assert error_before(kept, 2) == 5.0


def test_what_another_round_builds_on_has_counted() -> None:
    kept = kept_of()
    try_round(kept, (1, 0), 3.0)
    kept.follow((1, 1), 1.0, builds_on=True)
    kept.begin((1, 1))["error"].add_(4.0)
    assert (error_before(kept, 1), error_before(kept, 2)) == (3.0, 7.0)


def test_what_is_not_sent_leaves_no_trace() -> None:
    kept = kept_of(2.0)
    try_round(kept, (1, 0), 3.0)
    kept.give_up()
    kept.follow((2, 0), 1.0)
    assert error_before(kept, 2) == 2.0


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_a_scale_that_is_told_after_the_push_is_made_good(scale: float) -> None:
    """Of 10, scaled, 6 has gone, with 1 of the last step that should have been ``scale``."""
    kept = kept_of(1.0)
    try_round(kept, (1, 0), 10.0 - 6.0 - 0.0)
    assert kept.before(2, scale)["error"].tolist() == [(10.0 - 6.0 + scale) / scale] * 2
    kept.follow((2, 0), scale)
    assert kept.arrays["error"].tolist() == [10.0 - 6.0 + scale] * 2
    kept.give_up()
    kept.follow((3, 0), 4 * scale)
    assert kept.arrays["error"].tolist() == [4 * (10.0 - 6.0 + scale)] * 2


def test_of_averages_there_is_one_whatever_the_number_of_ranks() -> None:
    own: dict[str, Any] = {"w": {"error": torch.ones(1), OF_AVERAGES + "error": torch.ones(1)}}
    states: list[dict[str, Any]] = [
        {"residuals": own},
        {"residuals": {"w": {"error": torch.ones(1)}}},
    ]
    found = divided(states, ranks=range(1), world_size=1, averages=True)
    assert found["w"]["error"].item() == 1.0
    assert found["w"][OF_AVERAGES + "error"].item() == 1.0
