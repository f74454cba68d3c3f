"""The settings with which gradients are summed, as each step had them."""

from __future__ import annotations

from typing import Any

from foreprop.features.collectives.gradientsums import StepSettings

BITS = 18


def _at(settings: StepSettings, step: int) -> list[int]:
    return settings.digest_at(step, 0)


def _of(text: str) -> list[int]:
    settings = StepSettings(board=_no_board(), ranks=2)
    settings.announce(1, text)
    return _at(settings, 1)


def _no_board() -> Any:
    """Nothing is published where nothing differs."""
    return None


def test_a_sum_of_the_step_before_is_made_when_the_next_ones_settings_are_known() -> None:
    """A layer is frozen in step 3, whose word counts from 4 on, and one is unfrozen in step 4."""
    settings = StepSettings(board=_no_board(), ranks=2)
    for step in (2, 4, 5):
        settings.announce(step, f"from {step} on")
    expected = {3: "from 2 on", 4: "from 4 on", 5: "from 5 on", 9: "from 5 on"}
    assert {step: _at(settings, step) for step in expected} == {
        step: _of(text) for step, text in expected.items()
    }


def test_what_is_announced_last_for_a_step_counts() -> None:
    settings = StepSettings(board=_no_board(), ranks=2)
    for step, text in ((2, "a"), (3, "b"), (3, "c"), (3, "d")):
        settings.announce(step, text)
    assert [_at(settings, step) for step in (1, 2, 3)] == [[0] * BITS, _of("a"), _of("d")]
