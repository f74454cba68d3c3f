"""Error feedback: all that is left out is sent later, and never more than a bound is owed."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from codec_runs import are_equal, copied, noise, there_and_back

from foreprop.core.codec import Place
from foreprop.features.compression.codecs import make
from foreprop.features.compression.kernels import ErrorFeedback
from tests.tiers import long_cases

NAMES = ("int8", "int4", "int2", "topk:0.05", "randomk:0.05")
ELEMS, STEPS = 2000, 150


@functools.cache
def gradient(step: int) -> torch.Tensor:
    """One that points the same way in all steps, and noise."""
    return 1e-3 * noise(ELEMS, 1000).sign() + noise(ELEMS, step)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_is_all_gradients_less_the_last_error(name: str) -> None:
    codec = make(name)
    state = codec.new_state(ELEMS)
    sent, whole = torch.zeros(ELEMS).double(), torch.zeros(ELEMS).double()
    for step in range(STEPS):
        sent += there_and_back(codec, gradient(step), state, Place(step, 0, 0)).double()
        whole += gradient(step).double()
    assert torch.allclose(sent, whole - state["error"].double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*NAMES[1::2], *long_cases(*NAMES[::2])])
def test_without_the_state_more_and_more_would_be_missing(name: str) -> None:
    """What is owed stays as large as it was; without error feedback it grows with the steps."""
    codec = make(name)
    state = codec.new_state(ELEMS)
    owed, missing = [], torch.zeros(ELEMS)
    for step in range(2 * STEPS):
        there_and_back(codec, gradient(step), state, Place(step, 0, 0))
        owed.append(float(state["error"].norm()))
        missing += gradient(step) - there_and_back(codec, gradient(step), {}, Place(step, 0, 0))
    assert max(owed[STEPS:]) < 1.25 * max(owed[:STEPS])
    assert float(missing.norm()) > 3 * max(owed)


def test_the_error_of_top_k_is_within_the_bound_of_its_contraction() -> None:
    """With c = sqrt(1 - k / n), norm(e) <= c * (norm(e) + norm(g)), so at most c / (1 - c) * G."""
    codec = make("topk:0.05")
    state = codec.new_state(ELEMS)
    contraction = math.sqrt(1 - 0.05)
    largest = 0.0
    for step in range(STEPS):
        there_and_back(codec, gradient(step), state, Place(step, 0, 0))
        largest = max(largest, float(gradient(step).norm()))
        assert float(state["error"].norm()) <= contraction / (1 - contraction) * largest


def test_top_k_with_feedback_step_by_step() -> None:
    """e += g; send the k largest; they leave e (Stich et al., algorithm 1)."""
    codec, error = make("topk:0.01"), np.zeros(ELEMS, np.float32)
    state = codec.new_state(ELEMS)
    for step in range(30):
        error = error + gradient(step).numpy()
        chosen = np.argsort(-np.abs(error))[: ELEMS // 100]
        expected = np.zeros(ELEMS, np.float32)
        expected[chosen] = error[chosen]
        error[chosen] = 0
        out = there_and_back(codec, gradient(step), state, Place(step, 0, 0))
        assert np.array_equal(out.numpy(), expected)
        assert np.array_equal(state["error"].numpy(), error)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_no_trace(name: str, bad: float) -> None:
    codec = make(name)
    states = [codec.new_state(ELEMS), codec.new_state(ELEMS)]
    for step in range(5):
        if step == 3:
            broken = gradient(99).clone()
            broken[4] = bad
            there_and_back(codec, broken, states[0], Place(98, 0, 0))
        outs = [there_and_back(codec, gradient(step), s, Place(step, 0, 0)) for s in states]
        assert torch.equal(outs[0], outs[1])
    assert are_equal(*states)


def test_an_error_that_overflows_is_not_kept() -> None:
    codec = make("topk:0.5")
    state = {"error": torch.tensor([3e38, 1.0, 2.0, 3.0])}
    before = copied(state)
    there_and_back(codec, torch.tensor([3e38, 0.0, 0.0, 0.0]), state)
    assert are_equal(state, before)


def test_it_is_the_codec_alone_without_a_state() -> None:
    codec = make("int4")
    assert isinstance(codec, ErrorFeedback)
    values = noise(ELEMS)
    assert codec.encode(values, {}, Place(0, 0, 0)) == codec.codec.encode(
        values, {}, Place(0, 0, 0)
    )
