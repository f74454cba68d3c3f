"""When ranks seem to train on the same batch, and when not."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from foreprop.engine.sums import SameBatch

A, B = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def watch(caplog: pytest.LogCaptureFixture) -> SameBatch:
    caplog.set_level(logging.WARNING, "foreprop")
    return SameBatch("server 0")


def test_the_same_gradients_in_three_steps_are_told_once(
    watch: SameBatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        watch.look(0, [A, A.clone(), A.clone()], many=3)
        watch.look(1, [B, B.clone(), B.clone()], many=3)
        assert (watch.watching, caplog.text) == (True, "")
    watch.look(0, [A, A.clone(), A.clone()], many=3)
    assert not watch.watching
    watch.look(1, [B, B.clone(), B.clone()], many=3)
    assert [record.getMessage() for record in caplog.records] == [
        "server 0: the gradients of 3 ranks were the same in 3 steps, as if they trained on the"
        " same batches: foreprop.shard(loader) gives each rank its share"
    ]


@pytest.mark.parametrize("when", [0, 1, 2])
def test_one_array_that_differs_in_one_step_ends_it(
    when: int, watch: SameBatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(5):
        watch.look(0, [A, A, B if step == when else A], many=3)
        assert watch.watching == (step < when)
        if not watch.watching:
            break
    assert caplog.text == ""


@pytest.mark.parametrize("value", [0.0, 6.0, math.nan, math.inf])
@pytest.mark.parametrize("elems", [1, 4])
def test_what_has_one_value_in_all_elements_tells_nothing(
    value: float, elems: int, watch: SameBatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(9):
        watch.look(0, [torch.full((elems,), value)] * 2, many=2)
    assert (watch.watching, caplog.text) == (True, "")


def test_what_is_not_finite_tells_nothing(
    watch: SameBatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(9):
        watch.look(0, [torch.tensor([1.0, math.inf])] * 2, many=2)
    assert (watch.watching, caplog.text) == (True, "")


def test_one_push_tells_nothing(watch: SameBatch, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(9):
        watch.look(0, [A], many=1)
    assert (watch.watching, caplog.text) == (True, "")
