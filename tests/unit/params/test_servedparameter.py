"""Which backward pass is a step's last, as one parameter has learned it."""

from __future__ import annotations

import pytest
import torch

from foreprop.engine.sums import count_rows
from foreprop.params.servedparameter import BackwardPasses


def make_step(passes: BackwardPasses, discarded: int, kept: int) -> list[bool]:
    """Whether the gradient would leave, after each pass of a step."""
    left = []
    for _ in range(discarded):
        passes.now += 1
        left.append(passes.is_last)
        passes.discard()
    for _ in range(kept):
        passes.now += 1
        left.append(passes.is_last)
    return left


def end_step(passes: BackwardPasses) -> None:
    passes.now = passes.discards = 0


@pytest.mark.parametrize(("discarded", "kept"), [(0, 1), (0, 3), (1, 1), (2, 2)])
def test_later_steps_are_as_the_first_one(discarded: int, kept: int) -> None:
    passes = BackwardPasses(fixed=None)
    make_step(passes, discarded, kept)
    passes.learn(early=False)
    end_step(passes)
    for _ in range(2):
        assert make_step(passes, discarded, kept) == [False] * (discarded + kept - 1) + [True]
        end_step(passes)


def test_nothing_leaves_before_anything_is_known() -> None:
    assert make_step(BackwardPasses(fixed=None), 1, 3) == [False] * 4


def test_the_user_s_number_counts() -> None:
    passes = BackwardPasses(fixed=2)
    make_step(passes, 0, 1)
    passes.learn(early=False)
    end_step(passes)
    assert make_step(passes, 0, 2) == [False, True]


def test_rows_that_are_not_zero_are_counted() -> None:
    dense = torch.zeros(5, 2)
    dense[3, 1] = dense[1, 0] = 1
    assert count_rows(dense) == count_rows(dense.to_sparse(1)) == 2
    assert count_rows(None) == 0
