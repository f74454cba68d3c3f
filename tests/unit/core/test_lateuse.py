"""A use that is late is so by one step, whenever answers come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.lateuse import LateUse
from foreprop.errors import InternalError


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["before use", "before gradient", "never"]), max_size=30))
def test_values_are_those_of_the_step_before_or_one_more(answers: list[str]) -> None:
    """``answers``: when that of each step comes; "never" is: when it is waited for."""
    use, shown, waits = LateUse(), 0, 0
    for step, answer in enumerate(answers, 2):  # the one about step - 1
        is_late = use.begin(is_answered=answer == "before use")
        if not is_late:
            shown = step - 1
        assert shown == step - 1 - is_late
        assert is_late == (answer != "before use")
        if use.end():
            waits += 1
            shown = step - 1  # it has landed
        assert shown == step - 1
        assert not use.end()
    assert use.count == waits == sum(answer != "before use" for answer in answers)


def test_two_steps_late_is_an_error() -> None:
    use = LateUse()
    assert use.begin(is_answered=False)
    with pytest.raises(InternalError, match="would be used two steps late"):
        use.begin(is_answered=True)
