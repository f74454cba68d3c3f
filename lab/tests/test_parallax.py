"""The rule that sends a table by rows or by all-reduce, beside the model and the simulator."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreprop.core.parallax import Topology, prefers_servers, traffic
from foreprop.plan.deployment import Deployment, Table
from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop.plan.refined import predict, step_s
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

IDEAL = Hosts(send_s=0, receive_s=0, update_s=0, sum_elem_s=0, update_elem_s=0, copy_byte_s=0)
"""Hosts that cost nothing: what is left is the links."""
TABLE_ELEMS = 4_000_000
TIE = 0.03
"""Steps that differ by less are as good."""


def topologies() -> st.SearchStrategy[Topology]:
    return st.builds(
        Topology,
        st.sampled_from([2, 3, 4, 8, 48]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([0, 0, 1, 2, 4, 9]),
        st.booleans(),
    )


def test_by_hand() -> None:
    """W = 1 MB in rows of 400 bytes, alpha = 0.01, 8 workers: each way."""
    moved = traffic(1e6, 400, 0.01, Topology(8))
    assert moved.servers == pytest.approx(2 * 7 / 8 * 10_200)
    assert moved.all_gather == pytest.approx(7 * 10_200)
    assert moved.all_reduce == pytest.approx(2 * 7 / 8 * 1e6)
    dedicated = Topology(8, dedicated_servers=2)
    assert traffic(1e6, 400, 0.01, dedicated).servers == pytest.approx(4 * 10_200)
    many = Topology(8, dedicated_servers=20)
    assert traffic(1e6, 400, 0.01, many).servers == pytest.approx(10_200)


def test_workers_of_a_node_push_the_rows_that_they_touch_together_once() -> None:
    together, each = Topology(2, 4), Topology(2, 4, local_aggregation=False)
    assert traffic(1e6, 8, 0.5, together).servers == pytest.approx(1e6 * 2 * (1 - 0.5**4))
    assert traffic(1e6, 8, 0.5, each).servers == pytest.approx(1e6 * 2 * 0.5 * 4)
    assert together.pushed_share(0.5) == 0.9375
    assert (together.workers, together.pushes_per_node, each.pushes_per_node) == (8, 1, 4)


@given(st.floats(0, 1), st.integers(2, 1000), st.sampled_from([4.0, 40.0, 400.0, 4e6]))
def test_with_servers_beside_single_workers_the_number_of_nodes_does_not_matter(
    alpha: float, nodes: int, row_bytes: float
) -> None:
    pushed = alpha * (1 + 8 / row_bytes)
    if abs(pushed - 1) > 1e-9:
        assert prefers_servers(row_bytes, alpha, Topology(nodes)) == (pushed < 1)


def test_a_worker_alone_moves_nothing() -> None:
    assert traffic(1e6, 400, 0.5, Topology(1)).all_reduce == 0
    assert not prefers_servers(400, 0.5, Topology(1))


def test_on_one_machine_all_rows_pass_one_process() -> None:
    assert traffic(1e6, 400, 0.1, Topology(1, 4)).servers == pytest.approx(4 * 102_000)
    assert prefers_servers(400, 0.3, Topology(1, 4))
    assert not prefers_servers(400, 0.5, Topology(1, 4))


# Beside the refined model.
def by_rows(topology: Topology, alpha: float, row_elems: int) -> Deployment:
    """Twelve equal tables and next to nothing else: some are pushed while others come back."""
    layers = [Layer(name=str(n), sizes_elems=(1,), forward_s=0, backward_s=0) for n in range(12)]
    elems = TABLE_ELEMS // len(layers) // row_elems * row_elems
    return Deployment(
        layers=layers,
        architecture="ps" if topology.dedicated_servers else "hybrid",
        nodes=topology.nodes,
        workers_per_node=topology.workers_per_node,
        dedicated_servers=topology.dedicated_servers,
        local_aggregation=topology.local_aggregation,
        rate_bits_per_s=100e6,
        latency_s=0.0,
        hosts=IDEAL,
        tables=[Table(n, elems, row_elems, alpha) for n in range(len(layers))],
    )


def by_all_reduce(rows: Deployment) -> Deployment:
    return replace(rows, architecture="ring", dedicated_servers=0)


@settings(max_examples=150, deadline=None)
@given(topologies(), st.floats(0.01, 1), st.sampled_from([1, 4, 100, 10_000]))
@example(Topology(2), 0.6, 100)
@example(Topology(4), 0.8, 100)
@example(Topology(8), 0.9, 100)
@example(Topology(2), 0.6, 1)
@example(Topology(2, 4, local_aggregation=False), 0.5, 100)
@example(Topology(4, dedicated_servers=1), 0.3, 100)
@example(Topology(4, dedicated_servers=1), 0.45, 100)
def test_the_choice_keeps_the_models_busiest_link_less_busy(
    topology: Topology, alpha: float, row_elems: int
) -> None:
    rows = by_rows(topology, alpha, row_elems)
    predicted = predict(rows)
    rows_s = max(predicted.wire_s, predicted.server_s)
    whole_s = predict(by_all_reduce(rows)).wire_s
    if abs(rows_s - whole_s) > TIE * min(rows_s, whole_s):
        assert prefers_servers(4.0 * row_elems, alpha, topology) == (rows_s < whole_s)


@settings(max_examples=60, deadline=None)
@given(topologies(), st.floats(0.01, 1), st.sampled_from([1, 4, 100, 10_000]))
@example(Topology(2), 0.6, 100)
@example(Topology(4), 0.8, 100)
@example(Topology(8), 0.9, 100)
@example(Topology(2, 4, local_aggregation=False), 0.5, 100)
def test_the_choice_is_the_models_faster_step(
    topology: Topology, alpha: float, row_elems: int
) -> None:
    """With dedicated servers the last rows come back when nothing is pushed any more."""
    rows = by_rows(topology, alpha, row_elems)
    tie = TIE if not topology.dedicated_servers else 0.3
    rows_s, whole_s = step_s(rows), step_s(by_all_reduce(rows))
    if abs(rows_s - whole_s) > tie * min(rows_s, whole_s):
        assert prefers_servers(4.0 * row_elems, alpha, topology) == (rows_s < whole_s)


def test_two_nodes_that_touch_six_tenths_are_faster_by_rows() -> None:
    """50 million elements at 1 Gbit/s, with hosts that cost what they do."""
    one = Layer(name="one", sizes_elems=(1,), forward_s=0, backward_s=0)
    rows = replace(
        by_rows(Topology(2), 0.6, 100),
        layers=[one],
        tables=[Table(0, 50_000_000, 100, 0.6)],
        rate_bits_per_s=1e9,
        latency_s=100e-6,
        hosts=Hosts(),
    )
    assert prefers_servers(400, 0.6, Topology(2))
    assert step_s(by_all_reduce(rows)) / step_s(rows) == pytest.approx(1.63, abs=0.02)


# Beside the simulator, which has no rows: an array of as many elements stands for them.
@pytest.mark.parametrize(
    ("nodes", "alpha", "row_elems"),
    [(2, 0.6, 100), (4, 0.8, 100), (2, 0.6, 1), (3, 0.1, 4)],
)
def test_the_choice_is_the_simulators_faster_step(nodes: int, alpha: float, row_elems: int) -> None:
    table = ProfiledArray(name="words.weight", shape=(100_000, 1), forward_flops=1e6)
    touched = round(100_000 * alpha * (1 + 2 / row_elems))
    rows = msgspec.structs.replace(table, shape=(touched, 1))
    assert prefers_servers(4.0 * row_elems, alpha, Topology(nodes)) == (
        simulated_s("p3", rows, nodes) < simulated_s("ring", table, nodes)
    )


def simulated_s(system: str, array: ProfiledArray, nodes: int) -> float:
    """The last of some steps, with hosts that cost nothing."""
    setting = SimulatedSetting(
        profile=Profile(name="table", arrays=(array,)),
        nodes=nodes,
        rate_bits_per_s=20e6,
        scale=1,
        compute_s=1e-3,
        systems=(system,),
        slice_elems=2_500,
    )
    return simulate_system(system, setting, IDEAL, steps=3).step_s[0][-1]
