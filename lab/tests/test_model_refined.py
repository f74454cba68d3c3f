"""The refined model beside closed forms, beside no schedule's limit, and beside the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.config import PRESETS
from foreprop.core import parallax
from foreprop.errors import ConfigError
from foreprop.plan import limit, parameterserver
from foreprop.plan.deployment import Deployment, Table
from foreprop.plan.parameterserver import fair_rates
from foreprop.plan.profile import Layer, load_profile
from foreprop.plan.refined import Collective, all_reduce_s, ends_s, predict, step_s
from foreprop_lab.benchmarks.modelled_steps import deployment_of
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import rate_for_balance
from foreprop_lab.simulate.run import simulate_lab
from foreprop_lab.simulate.setting import SimulatedSetting
from lab.tests import closed_forms
from tests.tiers import long_cases

MBIT = 1e6
IDEAL = Hosts(
    send_s=0,
    receive_s=0,
    update_s=0,
    sum_elem_s=0,
    update_elem_s=0,
    relay_byte_s=0,
    relay_worker_byte_s=0,
    copy_byte_s=0,
)
"""Hosts that cost nothing: what is left is the links."""


def layers(*sizes_elems: int, forward_s: float = 0.0, backward_s: float = 0.0) -> list[Layer]:
    return [
        Layer(name=str(i), sizes_elems=(size,), forward_s=forward_s, backward_s=backward_s)
        for i, size in enumerate(sizes_elems)
    ]


def deployment(**changes: Any) -> Deployment:
    """Ten layers of 4 MB in all, no compute, 4 nodes on 100 Mbit/s, no latency."""
    fields: dict[str, Any] = {
        "layers": layers(*[100_000] * 10),
        "nodes": 4,
        "rate_bits_per_s": 100 * MBIT,
        "latency_s": 0.0,
        "hosts": IDEAL,
        "slice_elems": 2_500,
        "chunk_elems": 2_500,
        "bucket_bytes": 10_000,
    }
    return Deployment(**(fields | changes))


def without_headers(seconds: float, asked: Deployment) -> float:
    """As the closed forms have it."""
    return seconds * asked.link_bytes_per_s() / (asked.rate_bits_per_s / 8)


# Closed forms.
@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
@pytest.mark.parametrize("architecture", ["p2p", "ring", "ddp"])
def test_peers_and_rings_take_2_n_minus_1_by_n(architecture: Any, nodes: int) -> None:
    asked = deployment(architecture=architecture, nodes=nodes)
    expected_s = limit.wire_s(4e6, nodes=nodes, rate_bits_per_s=100 * MBIT)
    assert without_headers(step_s(asked), asked) == pytest.approx(expected_s, rel=0.03)
    assert without_headers(predict(asked).wire_s, asked) == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (1, 4), (2, 4), (4, 4), (4, 2), (7, 1)])
def test_dedicated_servers_take_the_longer_of_w_by_b_and_n_w_by_k_b(
    workers: int, servers: int
) -> None:
    asked = deployment(architecture="ps", preset="p3", nodes=workers, dedicated_servers=servers)
    expected_s = closed_forms.dedicated_s(
        4e6, workers=workers, servers=servers, rate_bits_per_s=100 * MBIT
    )
    assert without_headers(step_s(asked), asked) == pytest.approx(expected_s, rel=0.05)
    predicted = predict(asked)
    busiest_s = max(predicted.wire_s, predicted.server_s)
    assert without_headers(busiest_s, asked) == pytest.approx(expected_s, rel=0.02)


def test_pulling_after_the_backward_pass_keeps_both_ways_apart() -> None:
    """TensorFlow's: pushes first, then pulls; in one layer nothing overlaps, so twice as long."""
    one = layers(1_000_000)
    fields = {"layers": one, "architecture": "ps", "nodes": 4, "dedicated_servers": 1}
    apart = deployment(**fields, preset="tensorflow")
    once_s = closed_forms.dedicated_s(4e6, workers=4, servers=1, rate_bits_per_s=100 * MBIT)
    assert without_headers(step_s(apart), apart) == pytest.approx(2 * once_s, rel=0.01)
    together = deployment(**fields, preset="p3")
    assert step_s(together) < 0.55 * step_s(apart)


def test_dedicated_closed_form_by_hand() -> None:
    assert closed_forms.dedicated_s(1e6, workers=4, servers=2, rate_bits_per_s=8e6) == 2.0
    assert closed_forms.dedicated_s(1e6, workers=2, servers=4, rate_bits_per_s=8e6) == 1.0
    fast = closed_forms.dedicated_s(
        1e6, workers=4, servers=2, rate_bits_per_s=8e6, server_rate_bits_per_s=16e6
    )
    assert fast == 1.0


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
@pytest.mark.parametrize("servers", [0, 1, 2, 8])
def test_byteps_share_is_the_best_of_all(workers: int, servers: int) -> None:
    best_s = closed_forms.mixed_s(1e6, workers=workers, servers=servers, rate_bits_per_s=8e6)
    n, k = workers, servers
    if k <= n:
        assert best_s == pytest.approx(2 * n * (n - 1) / (n * n + k * n - 2 * k))
    for percent in range(101 if servers else 1):
        other_s = closed_forms.mixed_s(
            1e6, workers=n, servers=k, rate_bits_per_s=8e6, dedicated_share=percent / 100
        )
        assert other_s >= best_s * (1 - 1e-9)


def test_byteps_ends_are_all_reduce_and_dedicated_servers() -> None:
    whole = {"workers": 4, "rate_bits_per_s": 8e6}
    beside_s = closed_forms.mixed_s(1e6, servers=0, **whole)  # type: ignore[arg-type]
    assert beside_s == pytest.approx(limit.wire_s(1e6, nodes=4, rate_bits_per_s=8e6))
    for servers in (4, 9):
        dedicated_s = closed_forms.dedicated_s(1e6, servers=servers, **whole)  # type: ignore[arg-type]
        mixed_s = closed_forms.mixed_s(1e6, servers=servers, **whole)  # type: ignore[arg-type]
        assert mixed_s == pytest.approx(dedicated_s)


@pytest.mark.parametrize("alpha", [0.01, 0.3, 1.0])
def test_rows_cost_what_the_rule_counts(alpha: float) -> None:
    """Of each worker's pushes, without what its own server holds, and of that server's replies."""
    nodes, elems = 4, 1_000_000
    table = Table(layer=0, elems=elems, row_elems=10_000, alpha=alpha)
    asked = deployment(nodes=nodes, layers=layers(1, forward_s=0.0), tables=[table])
    moved = parallax.traffic(4 * elems, 40_000, alpha, asked.topology)
    dense = replace(asked, tables=[])
    wire_s = predict(asked).wire_s - predict(dense).wire_s
    expected_s = moved.servers * 8 / asked.rate_bits_per_s
    assert without_headers(wire_s, asked) == pytest.approx(expected_s, rel=0.01)
    ring = replace(asked, architecture="ring")
    ring_s = without_headers(predict(ring).wire_s, asked)
    assert ring_s == pytest.approx(moved.all_reduce * 8 / asked.rate_bits_per_s, rel=0.01)


def test_sparse_rows_go_to_servers_and_dense_arrays_round_the_ring() -> None:
    table = Table(layer=0, elems=5_000_000, row_elems=100, alpha=0.01)
    hybrid = deployment(architecture="hybrid", tables=[table])
    ring = replace(hybrid, architecture="ring")
    dense = replace(ring, tables=[])
    assert step_s(dense) < step_s(hybrid) < 1.1 * step_s(dense)
    assert step_s(ring) > 5 * step_s(hybrid)


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("alpha", [0.01, 0.3])
def test_ddp_hands_every_rank_s_rows_to_every_other(alpha: float, nodes: int) -> None:
    """(N - 1) alpha W pass each link each way."""
    elems = 1_000_000
    table = Table(layer=0, elems=elems, row_elems=10_000, alpha=alpha)
    asked = deployment(
        architecture="ddp", nodes=nodes, layers=layers(1, forward_s=0.0), tables=[table]
    )
    moved = parallax.traffic(4 * elems, 40_000, alpha, asked.topology)
    expected_s = moved.all_gather * 8 / asked.rate_bits_per_s
    assert without_headers(predict(asked).wire_s, asked) == pytest.approx(expected_s, rel=0.01)
    assert without_headers(step_s(asked), asked) == pytest.approx(expected_s, rel=0.01)
    dense = replace(asked, dense_gradients=True)
    dense_s = without_headers(step_s(dense), asked)
    assert dense_s == pytest.approx(moved.all_reduce * 8 / asked.rate_bits_per_s, rel=0.01)


def test_ddp_gathers_in_the_order_of_the_backward_pass() -> None:
    """A gradient that is there last is gathered when all others have been reduced."""
    slow = layers(*[100_000] * 4, backward_s=10.0)
    table = Table(layer=0, elems=1_000_000, row_elems=100, alpha=0.1)
    asked = deployment(architecture="ddp", layers=slow, tables=[table])
    first_s = without_headers(step_s(asked) - 40.0, asked)
    rows_s = 3 * 0.1 * 4e6 * (1 + 8 / 400) * 8 / asked.rate_bits_per_s
    array_s = limit.wire_s(400_000, nodes=4, rate_bits_per_s=asked.rate_bits_per_s)
    assert first_s == pytest.approx(rows_s + array_s, rel=0.02)
    last = replace(asked, tables=[table._replace(layer=3)])
    assert without_headers(step_s(last) - 40.0, asked) == pytest.approx(array_s, rel=0.02)


@pytest.mark.parametrize("architecture", ["p2p", "hybrid"])
def test_rows_that_several_of_a_node_s_workers_touch_leave_it_once(architecture: Any) -> None:
    table = Table(layer=0, elems=5_000_000, row_elems=100, alpha=0.3)
    asked = deployment(architecture=architecture, layers=layers(1), tables=[table])
    aggregated = replace(asked, workers_per_node=4)
    each = replace(aggregated, local_aggregation=False)
    assert aggregated.pushed_share(table) == pytest.approx(1 - 0.7**4)
    assert each.pushed_share(table) == pytest.approx(0.3)
    one_s, union_s, four_s = (predict(d).wire_s for d in (asked, aggregated, each))
    assert union_s == pytest.approx((1 - 0.7**4) / 0.3 * one_s, rel=0.01)
    assert four_s == pytest.approx(4 * one_s, rel=0.01)


RELAYING = replace(IDEAL, relay_byte_s=1e-8, relay_worker_byte_s=2e-8)


@pytest.mark.parametrize("servers", [0, 2])
def test_a_node_s_relays_take_turns_on_one_processor(servers: int) -> None:
    asked = deployment(
        architecture="ps" if servers else "p2p",
        dedicated_servers=servers,
        workers_per_node=4,
        rate_bits_per_s=1e12,
        hosts=RELAYING,
    )
    predicted = predict(asked)
    assert predicted.relays_s == pytest.approx(4e6 * (1e-8 + 4 * 2e-8))  # 0.36 s
    assert predicted.step_s == pytest.approx(0.36, rel=0.01)
    assert predicted.limited_by == "relays"
    assert predicted.saved_s["relays"] == pytest.approx(0.36, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"workers_per_node": 1},
        {"workers_per_node": 4, "local_aggregation": False},
        {"workers_per_node": 4, "architecture": "ring"},
        {"workers_per_node": 4, "architecture": "ddp"},
        {"workers_per_node": 4, "architecture": "hybrid"},  # no rows
    ],
)
def test_where_nothing_is_relayed_relays_cost_nothing(changes: dict[str, Any]) -> None:
    asked = deployment(hosts=RELAYING, **changes)
    predicted = predict(asked)
    assert (predicted.relays_s, predicted.saved_s["relays"]) == (0.0, 0.0)
    assert predicted.step_s == step_s(replace(asked, hosts=IDEAL))


def test_the_most_urgent_push_passes_a_busy_relay_first() -> None:
    """Of three arrays that are ready at once the first layer's is complete before the others."""
    asked = deployment(layers=layers(2_500, 2_500, 2_500), workers_per_node=2, nodes=2)
    asked = replace(asked, rate_bits_per_s=1e12, hosts=replace(IDEAL, relay_byte_s=1e-5))
    assert parameterserver.complete_s(asked, [0.0] * 3, 0.0) == pytest.approx(
        [0.15, 0.2, 0.3], rel=0.01
    )
    fifo = replace(asked, preset="slicing")
    assert parameterserver.complete_s(fifo, [0.0] * 3, 0.0) == pytest.approx(
        [0.2, 0.25, 0.3], rel=0.01
    )


@pytest.mark.parametrize("architecture", ["p2p", "hybrid"])
def test_relays_sum_each_worker_s_rows_and_push_on_each_row_once(architecture: Any) -> None:
    table = Table(layer=0, elems=5_000_000, row_elems=100, alpha=0.3)
    dense_bytes = 0.0 if architecture == "hybrid" else 400.0
    asked = deployment(
        architecture=architecture,
        layers=layers(100),
        tables=[table],
        workers_per_node=4,
        rate_bits_per_s=1e12,
        hosts=RELAYING,
    )
    rows_bytes = 50_000 * 408
    expected_s = rows_bytes * ((1 - 0.7**4) * 1e-8 + 4 * 0.3 * 2e-8) + dense_bytes * 9e-8
    predicted = predict(asked)
    assert predicted.relays_s == pytest.approx(expected_s, rel=1e-6)
    assert predicted.step_s == pytest.approx(expected_s, rel=0.01)
    assert predicted.limited_by == "relays"


@pytest.mark.parametrize("architecture", ["p2p", "hybrid"])
def test_servers_that_update_rows_slowly_limit(architecture: Any) -> None:
    table = Table(layer=0, elems=5_000_000, row_elems=100, alpha=0.1)
    asked = deployment(
        architecture=architecture,
        layers=layers(1),
        tables=[table],
        rate_bits_per_s=1e12,
        hosts=replace(IDEAL, update_elem_s=1e-6),
    )
    predicted = predict(asked)
    assert predicted.server_s == pytest.approx(
        0.5, rel=1e-4
    )  # all 4 nodes' rows, a quarter on each
    assert predicted.step_s == pytest.approx(0.5, rel=0.1)
    assert predicted.limited_by == "server"


@pytest.mark.parametrize("architecture", ["p2p", "ring", "hybrid", "ddp"])
def test_a_model_may_be_a_table_and_nothing_else(architecture: Any) -> None:
    empty = [replace(layer, sizes_elems=()) for layer in layers(1)]
    table = Table(layer=0, elems=1_000_000, row_elems=100, alpha=0.1)
    asked = deployment(architecture=architecture, layers=empty, tables=[table])
    assert predict(asked).wire_s > 0
    assert step_s(asked) >= predict(asked).wire_s * (1 - 1e-9)


def test_half_precision_takes_half_as_long() -> None:
    for architecture in ("p2p", "ring"):
        asked = deployment(architecture=architecture)
        halved = replace(asked, bytes_per_elem=2)
        assert step_s(halved) == pytest.approx(step_s(asked) / 2, rel=0.02)


@pytest.mark.parametrize("servers", [0, 2])
def test_local_aggregation_sends_a_node_s_gradients_once(servers: int) -> None:
    fields = {"architecture": "ps" if servers else "p2p", "dedicated_servers": servers}
    one = deployment(**fields)
    aggregated = replace(one, workers_per_node=3)
    each = replace(aggregated, local_aggregation=False)
    assert step_s(aggregated) == pytest.approx(step_s(one))
    assert step_s(each) == pytest.approx(3 * step_s(one), rel=0.02)


def test_latency_is_a_ring_s_price_of_many_ranks() -> None:
    """2 (R - 1) rounds for a collective that carries next to nothing."""
    asked = deployment(
        architecture="ddp", layers=layers(1), latency_s=1e-3, nodes=8, rate_bits_per_s=1e12
    )
    assert step_s(asked) == pytest.approx(14e-3, rel=0.01)
    assert predict(asked).limited_by == "latency"
    assert all_reduce_s(asked, 1)[1] == pytest.approx(14e-3, rel=0.01)


# What limits.
@pytest.mark.parametrize(
    ("changes", "limited_by"),
    [
        ({"rate_bits_per_s": 1e12, "layers": layers(10_000, backward_s=0.1)}, "compute"),
        ({}, "wire"),
        ({"architecture": "ps", "dedicated_servers": 1}, "server"),
        ({"architecture": "ps", "dedicated_servers": 8}, "wire"),
        ({"rate_bits_per_s": 1e12, "hosts": Hosts(update_elem_s=1e-5)}, "server"),
        ({"rate_bits_per_s": 1e12, "latency_s": 1.0}, "latency"),
    ],
)
def test_what_limits_is_what_would_save_most(changes: Any, limited_by: str) -> None:
    predicted = predict(deployment(**changes))
    assert predicted.limited_by == limited_by
    assert predicted.saved_s[predicted.limited_by] > 0.3 * predicted.step_s


def test_links_that_are_equally_busy_do_not_hide_each_other() -> None:
    """As many servers as workers: neither kind of link would save anything alone."""
    predicted = predict(deployment(architecture="ps", dedicated_servers=4))
    assert predicted.limited_by in ("wire", "server")
    assert predicted.saved_s["wire"] < 0.05 * predicted.step_s
    assert predicted.saved_s["server"] < 0.05 * predicted.step_s


@pytest.mark.parametrize("architecture", ["p2p", "ring", "hybrid", "ddp"])
def test_one_worker_only_computes(architecture: Any) -> None:
    asked = deployment(
        architecture=architecture, nodes=1, layers=layers(1_000, forward_s=0.1, backward_s=0.2)
    )
    assert step_s(asked) == pytest.approx(0.3, rel=0.01)


sizes = st.lists(st.integers(1, 400_000), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    sizes,
    st.sampled_from([*PRESETS, "ring", "ddp"]),
    st.integers(2, 6),
    st.floats(0.1, 10.0),
)
def test_no_system_beats_the_limit(
    sizes_elems: list[int], system: str, nodes: int, balance: float
) -> None:
    given_layers = layers(*sizes_elems, forward_s=0.01, backward_s=0.02)
    rate = rate_for_balance(given_layers, nodes=nodes, balance=balance)
    architecture = system if system in ("ring", "ddp") else "p2p"
    preset = system if system in PRESETS else "p3"
    asked = deployment(
        layers=given_layers,
        architecture=architecture,
        preset=preset,
        nodes=nodes,
        rate_bits_per_s=rate,
        slice_elems=10_000,
        chunk_elems=20_000,
        bucket_bytes=100_000,
    )
    shortest_s = limit.limit_s(given_layers, nodes=nodes, rate_bits_per_s=rate)
    assert step_s(asked) >= shortest_s * (1 - 1e-6)


@pytest.mark.parametrize(("servers", "share"), [(1, 1.0), (2, 0.5)])
def test_a_server_s_processor_takes_every_push_and_every_answer(servers: int, share: float) -> None:
    """Four workers' pushes of 4 MB, and as many answers, on each server's part."""
    asked = deployment(
        architecture="ps",
        dedicated_servers=servers,
        rate_bits_per_s=1e15,
        hosts=replace(IDEAL, server_byte_s=50e-9),
    )
    predicted = predict(asked)
    expected_s = 2 * 4 * 4e6 * share * 50e-9
    assert predicted.server_s == pytest.approx(expected_s, rel=1e-6)
    assert predicted.step_s == pytest.approx(expected_s, rel=0.01)
    assert predicted.limited_by == "server"


# Beside the simulator.
@pytest.mark.parametrize(
    ("system", "at_most"),
    [("p3", 0.025), ("slicing", 0.025), ("kvstore", 0.08), ("ring", 0.025), ("ddp", 0.025)],
)
@pytest.mark.parametrize("balance", [0.75, *long_cases(1.5)])
def test_steps_are_as_long_as_they_are_simulated(
    balance: float, system: str, at_most: float
) -> None:
    setting = SimulatedSetting(
        profile=load_profile("sockeye"),
        systems=(system,),
        nodes=4,
        compute_s=2.0,
        balance=balance,
        iterations=1,
        warm_up=1,
    )
    (simulated,) = simulate_lab(setting)
    modelled_s = step_s(deployment_of(setting, system))
    assert modelled_s == pytest.approx(simulated.iteration_s.median, rel=at_most)


# Its parts.
link_matrices = st.integers(1, 4).flatmap(
    lambda links: st.lists(
        st.lists(st.integers(0, 3), min_size=links, max_size=links), min_size=1, max_size=5
    )
)


@given(link_matrices, st.data())
def test_fair_rates_fill_a_link_of_every_lane_and_no_link_too_much(
    lanes: list[list[int]], data: st.DataObject
) -> None:
    connections = np.array(lanes, dtype=np.float64).T
    capacities = np.array([data.draw(st.floats(1.0, 100.0)) for _ in connections])
    active = np.array([data.draw(st.booleans()) for _ in lanes])
    rates = fair_rates(capacities, connections, active, 1e6)
    carried = connections @ rates
    assert (carried <= capacities * (1 + 1e-6)).all()
    assert (rates[~active] == 0).all()
    full = carried >= capacities * (1 - 1e-6)
    for lane in np.flatnonzero(active):
        passed = connections[:, lane] > 0
        assert (full & passed).any() if passed.any() else rates[lane] == 1e6


def test_collectives_share_links_and_wait_their_turn() -> None:
    alone = [Collective(1.0, 2.0, 2.0, 5)]
    assert ends_s(alone, in_flight=2) == pytest.approx([3.0])
    three = [Collective(0.0, 1.0, 1.0, 5)] * 3
    assert ends_s(three, in_flight=2) == pytest.approx([2.0, 2.0, 3.0])
    assert ends_s(three, in_flight=1) == pytest.approx([1.0, 2.0, 3.0])
    assert ends_s(three, in_flight=3, in_flight_elems=5) == pytest.approx([1.0, 2.0, 3.0])
    slow = [Collective(0.0, 1.0, 4.0, 5)] * 2  # neither can use half of the links
    assert ends_s(slow, in_flight=2) == pytest.approx([4.0, 4.0])


def test_every_server_has_an_equal_share_of_a_table() -> None:
    table = Table(layer=3, elems=400, row_elems=4, alpha=0.5)
    pieces = parameterserver.rows_of(deployment(tables=[table]), first=10, servers=4)
    assert [piece.server for piece in pieces] == [0, 1, 2, 3]
    assert sum(piece.elems for piece in pieces) == pytest.approx(200)
    assert parameterserver.parameters_by_layer(deployment(tables=[table]))[3] == [3, 10]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architecture": "star"}, "architecture is 'star'; there are p2p"),
        ({"preset": "fast"}, "preset is 'fast'; there are p3"),
        ({"layers": []}, "layers is empty"),
        ({"nodes": 0}, "nodes is 0; at least 1"),
        ({"dedicated_servers": 2}, "architecture is 'p2p' and dedicated_servers is 2"),
        ({"architecture": "ps"}, "architecture is 'ps' and dedicated_servers is 0"),
        ({"rate_bits_per_s": 0.0}, "rate_bits_per_s is 0.0; it must be positive"),
        ({"latency_s": -1.0}, "latency_s is -1.0; it must be finite"),
        ({"tables": [Table(99, 10, 1, 0.5)]}, "a table's layer is 99; there are 10"),
        ({"tables": [Table(0, 10, 1, 1.5)]}, "a table's alpha is 1.5; it must be from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        deployment(**changes)


def test_only_what_the_lab_has_a_model_for() -> None:
    setting = SimulatedSetting(profile=load_profile("resnet50"), systems=("p3",))
    with pytest.raises(ConfigError, match="system is 'mxnet-p3'; the model knows p3"):
        deployment_of(setting, "mxnet-p3")
