"""The simulation of ready times: what it computes in cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from foreprop.plan import limit
from foreprop.plan.profile import Layer, load_profile
from foreprop_lab.benchmarks.jitter import simulate_jitter
from foreprop_lab.setting.labsetting import rate_for_balance

# One element's wire time: 2 (N - 1) / N x 4 bytes with headers.
ELEM_S = limit.wire_s(4 * limit.HEADER_FACTOR, nodes=2, rate_bits_per_s=1.0)


def layer(elems: int) -> Layer:
    return Layer(name="a", sizes_elems=(elems,), forward_s=ELEM_S, backward_s=2 * ELEM_S)


def simulate(layers: list[Layer], **changes: float) -> tuple[float, ...]:
    given = {"nodes": 2, "rate_bits_per_s": 1.0, "chunk_elems": 1, "jitter": 0.0, "steps": 3}
    result = simulate_jitter(layers, **(given | changes))  # type: ignore[arg-type]
    times = (result.even_s, result.planned_s, result.adaptive_s, result.backward_s)
    return tuple(round(seconds / ELEM_S, 6) for seconds in times)


def test_one_layer() -> None:
    """Backward 2, three chunks 3, forward 1."""
    assert simulate([layer(3)]) == (6.0, 6.0, 6.0, 6.0)


def test_the_first_layer_goes_ahead_of_the_last_one_s_rest() -> None:
    """The last layer's 9 chunks begin at 2, the first one's 1 is ready at 4 and goes next, to 5;
    then forward 1, and the other 7 chunks until 12: forward 1 makes 13. By the backward order the
    first layer's chunk comes last, at 12: two forward layers make 14.
    """
    assert simulate([layer(1), layer(9)]) == (13.0, 13.0, 13.0, 14.0)


@pytest.mark.parametrize("model", ["resnet50", "vgg19"])
def test_a_planned_order_loses_little_under_jitter(model: str) -> None:
    layers = load_profile(model).layers(scale=1, compute_s=1.0)
    rate = rate_for_balance(layers, nodes=4, balance=1.0)
    result = simulate_jitter(
        layers, nodes=4, rate_bits_per_s=rate, chunk_elems=400_000, jitter=0.2, steps=50
    )
    assert result.adaptive_s <= result.planned_s < 1.05 * result.adaptive_s
    assert result.planned_s < result.backward_s
    assert result.even_s < result.planned_s
