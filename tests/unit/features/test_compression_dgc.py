"""Deep Gradient Compression: u and v step by step, clipping, warm-up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from codec_runs import are_equal, copied, noise, there_and_back

from foreprop.core.codec import Place
from foreprop.features.compression.codecs import make
from foreprop.features.compression.dgc import DgcTraining

ELEMS = 1000


def gradient(step: int) -> torch.Tensor:
    return noise(ELEMS, 1000, 1.0) + noise(ELEMS, step, 1.0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 20.0])
def test_momentum_and_accumulation_step_by_step(nesterov: bool, clip_norm: float | None) -> None:
    """Lin et al., algorithm 4: clip, u = m u + g, v = v + u, send the largest of v, mask both."""
    training = DgcTraining(momentum=0.9, nesterov=nesterov, clip_norm=clip_norm, pushes=4)
    codec = make("dgc:0.02", training)
    state = codec.new_state(ELEMS)
    u, v = np.zeros(ELEMS), np.zeros(ELEMS)
    for step in range(40):
        g = gradient(step).double().numpy()
        norm = math.sqrt(sum(x * x for x in g))
        assert norm > 20
        if clip_norm is not None:
            g = g * (clip_norm / 2) / norm  # N^(-1/2) of it
        if nesterov:
            u = 0.9 * (u + g)
            v = v + u + g
        else:
            u = 0.9 * u + g
            v = v + u
        chosen = np.argsort(-np.abs(v))[:20]
        expected = np.zeros(ELEMS)
        expected[chosen] = v[chosen]
        u[chosen] = v[chosen] = 0
        out = there_and_back(codec, gradient(step), state, Place(step, 0, 0))
        assert np.allclose(out.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert np.allclose(state["momentum"].numpy(), u, rtol=1e-4, atol=1e-5)
        assert np.allclose(state["accumulated"].numpy(), v, rtol=1e-4, atol=1e-5)


def test_a_gradient_below_the_limit_is_not_scaled() -> None:
    clipped = make("dgc:0.1", DgcTraining(clip_norm=1.0, pushes=4))
    plain = make("dgc:0.1")
    for norm in (0.49, 0.51):
        values = noise(ELEMS)
        values *= norm / values.norm()
        outs = [there_and_back(codec, values, codec.new_state(ELEMS)) for codec in (clipped, plain)]
        assert torch.equal(*outs) == (norm < 0.5)


@pytest.mark.parametrize("limit", [{"clip_norm": 1.0}, {"clip_value": 1e-3}])
def test_limits_are_those_of_the_scaled_loss(limit: dict[str, float]) -> None:
    """A power of two, which rounds nothing."""
    codec = make("dgc:0.1", DgcTraining(momentum=0.5, pushes=1, **limit))  # type: ignore[arg-type]
    states = [codec.new_state(ELEMS), codec.new_state(ELEMS)]
    for step in range(4):
        values = noise(ELEMS, step, 0.1)
        plain = there_and_back(codec, values, states[0], Place(step, 0, 0))
        scaled = there_and_back(codec, values * 64, states[1], Place(step, 0, 0, 64.0))
        assert torch.equal(plain * 64, scaled)
    assert torch.equal(states[0]["accumulated"] * 64, states[1]["accumulated"])


def test_each_element_of_a_gradient_is_within_the_limit_before_it_is_accumulated() -> None:
    codec = make("dgc:0.001", DgcTraining(clip_value=0.5))
    state = codec.new_state(5)
    values = torch.tensor([3.0, 0.25, -0.375, 0.4375, -0.125])
    for step in range(2):
        there_and_back(codec, values, state, Place(step, 0, 0))
    # of the first step the first element has left, of the second one the fourth
    assert state["accumulated"].tolist() == [0.5, 0.5, -0.75, 0.0, -0.25]
    before = copied(state)
    values[1] = torch.inf
    assert not bool(there_and_back(codec, values, state, Place(2, 0, 0)).isfinite().all())
    assert are_equal(state, before)


def test_without_momentum_it_is_top_k_with_error_feedback() -> None:
    codecs = [make("dgc:0.01"), make("topk:0.01")]
    states = [codec.new_state(ELEMS) for codec in codecs]
    for step in range(30):
        place = Place(step, 0, 0)
        outs = [
            there_and_back(codec, gradient(step), state, place)
            for codec, state in zip(codecs, states, strict=True)
        ]
        assert torch.equal(*outs)
    assert torch.equal(states[0]["accumulated"], states[1]["error"])


def test_what_waits_moves_as_far_as_momentum_sgd_would_have_moved_it() -> None:
    """Section 3.1: v sums velocities, not gradients. Section 3.2: what is sent loses its u."""
    codec = make("dgc:0.2", DgcTraining(momentum=0.5))
    state = codec.new_state(5)
    first = there_and_back(codec, torch.tensor([4.0, 1.0, 0.0, 0.0, 0.0]), state)
    second = there_and_back(codec, torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), state)
    assert first.tolist() == [4.0, 0.0, 0.0, 0.0, 0.0]
    # u = 1, then 0.5 * 1 + 1 = 1.5; without masking the first would move by 2 more
    assert second.tolist() == [0.0, 2.5, 0.0, 0.0, 0.0]
    assert state["momentum"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_warm_up_on_the_wire() -> None:
    codec = make("dgc", DgcTraining(warmup_steps=100))
    state = codec.new_state(10_000)
    sizes = []
    for step in (0, 99, 100, 200, 300, 400, 500):
        data = codec.encode(noise(10_000), state, Place(step, 0, 0))
        codec.decode(data, torch.empty(10_000), Place(step, 0, 1))
        sizes.append(len(data) / 8)
        assert len(data) <= codec.most_bytes(10_000)
    assert sizes == [2500, 2500, 625, 157, 40, 10, 10]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_sent_as_nan_and_forgotten(bad: float) -> None:
    codec = make("dgc:0.01", DgcTraining(momentum=0.9, clip_norm=1.0))
    state = codec.new_state(ELEMS)
    there_and_back(codec, gradient(0), state)
    before, broken = copied(state), gradient(1)
    broken[123] = bad
    assert int(there_and_back(codec, broken, state).isnan().sum()) == 10
    assert are_equal(state, before)
