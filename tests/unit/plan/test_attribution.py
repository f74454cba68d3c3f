from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.plan.passes import Attribution, PassRecord, attribute


def record(
    used_s: dict[int, float],
    ready_s: dict[int, float],
    *,
    forward_s: float = 10.0,
    backward_s: float = 20.0,
) -> PassRecord:
    return PassRecord(forward_s=forward_s, backward_s=backward_s, used_s=used_s, ready_s=ready_s)


def of(*records: PassRecord, forward_s: float = 10.0, backward_s: float = 20.0) -> Attribution:
    return attribute(records, forward_s=forward_s, backward_s=backward_s)


def test_first_uses_cut_the_forward_pass_and_gradients_the_backward_pass() -> None:
    found = of(record({1: 2.0, 0: 3.0, 2: 7.0}, {2: 4.0, 0: 9.0, 1: 19.0}))
    assert found == Attribution(
        order=(1, 0, 2),
        forward_s=(1.0, 4.0, 3.0),
        backward_s=(10.0, 5.0, 4.0),
        before_first_use_s=2.0,
        after_last_gradient_s=1.0,
    )


def test_arrays_whose_gradients_come_together_take_no_time_of_their_own() -> None:
    """An LSTM's are ready at once, in whatever order: none is ready before the work is done."""
    found = of(record({0: 0.0, 1: 0.0, 2: 0.0}, {0: 18.0, 1: 18.5, 2: 19.0}))
    assert found.backward_s == (0.0, 0.0, 19.0)
    assert found.forward_s == (0.0, 0.0, 10.0)


def test_an_array_that_is_used_first_and_ready_early_waits_for_the_later_ones() -> None:
    found = of(record({0: 0.0, 1: 5.0}, {0: 6.0, 1: 20.0}))
    assert found.backward_s == (0.0, 20.0)


def test_an_array_without_a_gradient_leaves_its_time_to_the_one_before_it() -> None:
    found = of(record({0: 1.0, 1: 3.0, 2: 8.0}, {0: 20.0, 2: 5.0}))
    assert (found.order, found.forward_s) == ((0, 2), (7.0, 2.0))
    assert found.before_first_use_s == 1.0


def test_an_array_that_nobody_saw_used_comes_last() -> None:
    found = of(record({3: 0.0}, {0: 1.0, 3: 20.0, 2: 1.0}))
    assert found.order == (3, 0, 2)
    assert found.forward_s == (10.0, 0.0, 0.0)


def test_no_gradient_at_all_leaves_no_arrays() -> None:
    found = of(record({0: 1.0}, {}))
    assert found.order == found.forward_s == found.backward_s == ()
    assert (found.before_first_use_s, found.after_last_gradient_s) == (10.0, 20.0)


def test_branches_of_several_passes_are_all_there() -> None:
    left = record({0: 0.0, 1: 4.0}, {1: 5.0, 0: 20.0})
    right = record({0: 0.0, 2: 4.0}, {2: 5.0, 0: 20.0})
    found = of(left, right, left)
    assert found.order == (0, 1, 2)
    assert found.forward_s == (4.0, 6.0, 0.0)


def test_a_gradient_of_an_earlier_backward_pass_was_ready_from_the_start() -> None:
    """It is one of an array that the last pass does not use, with gradient accumulation."""
    found = of(record({0: 0.0, 1: 5.0}, {0: -3.0, 1: 20.0}))
    assert found.backward_s == (0.0, 20.0)


def test_medians_of_the_passes_are_stretched_to_the_plain_passes() -> None:
    records = [
        record({0: 0.0, 1: at_s}, {1: 10.0, 0: 20.0}, forward_s=12.0) for at_s in (3.0, 2.0, 11.0)
    ]
    found = of(*records, forward_s=6.0, backward_s=10.0)
    assert found.forward_s == pytest.approx((1.5, 4.5))
    assert found.backward_s == (5.0, 5.0)


times = st.floats(0.0, 1.0)
passes = st.builds(
    PassRecord,
    forward_s=st.floats(1.0, 2.0),
    backward_s=st.floats(1.0, 2.0),
    used_s=st.dictionaries(st.integers(0, 5), times).map(
        lambda used: dict(sorted(used.items(), key=lambda entry: entry[1]))
    ),
    ready_s=st.dictionaries(st.integers(0, 5), times),
)


@given(st.lists(passes, min_size=1, max_size=4), st.floats(0.1, 9.0), st.floats(0.1, 9.0))
def test_nothing_is_negative_and_nothing_is_lost(
    records: list[PassRecord], forward_s: float, backward_s: float
) -> None:
    found = of(*records, forward_s=forward_s, backward_s=backward_s)
    assert set(found.order) == {array for each in records for array in each.ready_s}
    assert len(set(found.order)) == len(found.order)
    for outside_s, parts_s, total_s in (
        (found.before_first_use_s, found.forward_s, forward_s),
        (found.after_last_gradient_s, found.backward_s, backward_s),
    ):
        assert min((outside_s, *parts_s)) >= 0
        whole_s = outside_s + sum(parts_s)
        assert whole_s == pytest.approx(total_s) or whole_s == 0.0


@given(passes)
def test_one_pass_is_shared_out_without_rest(each: PassRecord) -> None:
    """Gradients of later arrays are ready when the parts of all arrays behind them are over."""
    found = of(each, forward_s=each.forward_s, backward_s=each.backward_s)
    ends_s = [sum(found.backward_s[n:]) for n in range(len(found.order))]
    for number, end_s in enumerate(ends_s):
        later_s = [each.ready_s[array] for array in found.order[number:]]
        assert end_s == pytest.approx(max(later_s), abs=1e-9)
