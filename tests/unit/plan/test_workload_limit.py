from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.plan import limit
from foreprop.plan.profile import Layer

HEADERS = 1514 / 1448
MBIT = 1e6


def layer(*sizes_elems: int, forward_s: float, backward_s: float) -> Layer:
    return Layer(name="x", sizes_elems=sizes_elems, forward_s=forward_s, backward_s=backward_s)


times = st.floats(0.0, 1.0)
many_layers = st.lists(
    st.builds(
        Layer,
        name=st.just("x"),
        sizes_elems=st.lists(st.integers(1, 10**7), max_size=4).map(tuple),
        forward_s=times,
        backward_s=times,
    ),
    min_size=1,
    max_size=8,
)
node_counts = st.integers(2, 16)


def over_every_array(layers: list[Layer], *, nodes: int, rate_bits_per_s: float) -> float:
    """The issue's words, array by array: backward k.. + wire 1..k + forward k.. ."""
    arrays = [(at, size) for at, layer in enumerate(layers) for size in layer.sizes_elems]
    longest = sum(layer.forward_s + layer.backward_s for layer in layers)
    for k, (at, _) in enumerate(arrays):
        first_bytes = 4 * sum(size for _, size in arrays[: k + 1])
        on_wire_s = HEADERS * first_bytes * 8 * 2 * (nodes - 1) / nodes / rate_bits_per_s
        backward_s = sum(layer.backward_s for layer in layers[at:])
        forward_s = sum(layer.forward_s for layer in layers[at:])
        longest = max(longest, backward_s + on_wire_s + forward_s)
    return longest


def test_headers_are_those_of_an_ethernet_frame_of_1500_bytes() -> None:
    assert limit.HEADER_FACTOR == HEADERS


def test_wire_time() -> None:
    # 4 nodes: 1.5 times a million bytes pass each link in either direction
    assert limit.wire_s(1e6, nodes=4, rate_bits_per_s=12 * MBIT) == pytest.approx(1.0)
    assert limit.wire_s(1e6, nodes=2, rate_bits_per_s=8 * MBIT) == pytest.approx(1.0)


def test_all_in_one_layer_overlaps_nothing() -> None:
    model = [layer(200_000, 50_000, forward_s=1.0, backward_s=2.0)]
    shortest = limit.limit_s(model, nodes=2, rate_bits_per_s=8 * MBIT)
    assert shortest == pytest.approx(3.0 + 1.0 * HEADERS)


def test_compute_bound_only_the_first_layer_is_not_hidden() -> None:
    model = [
        layer(250, forward_s=1.0, backward_s=2.0),
        layer(25_000, forward_s=1.0, backward_s=2.0),
        layer(25_000, forward_s=1.0, backward_s=2.0),
    ]
    shortest = limit.limit_s(model, nodes=2, rate_bits_per_s=8 * MBIT)
    assert shortest == pytest.approx(9.0 + 0.001 * HEADERS)


def test_compute_alone_where_the_wire_costs_nothing() -> None:
    model = [layer(250, forward_s=1.0, backward_s=2.0), layer(250, forward_s=1.0, backward_s=2.0)]
    assert limit.limit_s(model, nodes=2, rate_bits_per_s=1e18) == pytest.approx(6.0)


def test_wire_bound_only_the_last_layer_is_not_hidden() -> None:
    model = [
        layer(250, forward_s=0.1, backward_s=0.2),
        layer(250_000, forward_s=0.1, backward_s=0.2),
        layer(2_500_000, forward_s=0.1, backward_s=0.2),
    ]
    shortest = limit.limit_s(model, nodes=2, rate_bits_per_s=8 * MBIT)
    assert shortest == pytest.approx(11.001 * HEADERS + 0.3)


def test_what_is_computed_before_the_first_array_hides_it() -> None:
    """A frozen network in front: all of the wire time fits into its forward pass."""
    frozen = layer(forward_s=2.0, backward_s=0.0)
    model = [layer(250_000, forward_s=0.1, backward_s=0.2)]
    assert limit.limit_s([frozen, *model], nodes=2, rate_bits_per_s=8 * MBIT) == pytest.approx(2.3)
    alone = limit.limit_s(model, nodes=2, rate_bits_per_s=8 * MBIT)
    assert alone == pytest.approx(0.3 + 1.0 * HEADERS)


def test_a_huge_first_layer_cannot_be_hidden() -> None:
    """Sockeye's embedding: no FLOPs, half the bytes, used first and its gradient made last."""
    model = [
        layer(2_500_000, forward_s=0.0, backward_s=0.0),
        layer(250_000, forward_s=1.0, backward_s=2.0),
        layer(2_250_000, forward_s=0.5, backward_s=1.0),
    ]
    for rate, expected in (
        (80 * MBIT, 4.5 + 1.1 * HEADERS),  # it and the next layer, on top of all compute
        (8 * MBIT, 1.5 + 20.0 * HEADERS),  # everything's, and only the last layer's compute
    ):
        assert limit.limit_s(model, nodes=2, rate_bits_per_s=rate) == pytest.approx(expected)


@given(many_layers, node_counts, st.floats(1e6, 1e11))
def test_limit_is_the_largest_over_every_array(
    layers: list[Layer], nodes: int, rate: float
) -> None:
    expected = over_every_array(layers, nodes=nodes, rate_bits_per_s=rate)
    assert limit.limit_s(layers, nodes=nodes, rate_bits_per_s=rate) == pytest.approx(expected)


@given(many_layers, node_counts, st.floats(1e6, 1e11))
def test_limit_lies_between_compute_or_wire_and_their_sum(
    layers: list[Layer], nodes: int, rate: float
) -> None:
    compute_s = limit.compute_s(layers)
    on_wire = HEADERS * limit.model_bytes(layers)
    wire_s = limit.wire_s(on_wire, nodes=nodes, rate_bits_per_s=rate)
    shortest = limit.limit_s(layers, nodes=nodes, rate_bits_per_s=rate)
    assert max(compute_s, wire_s) * (1 - 1e-9) <= shortest
    assert shortest <= (compute_s + wire_s) * (1 + 1e-9)
