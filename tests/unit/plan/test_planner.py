"""What the planner considers, and that its figures are the refined model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_example import GBIT, SMALL, setting, sparse_profile

from foreprop.config import PRESETS, Config
from foreprop.errors import ConfigError
from foreprop.plan.deployment import Deployment, Table
from foreprop.plan.planner import (
    PLANNED,
    Candidate,
    candidate_step_s,
    choose,
    enough_servers,
    forecast,
    forecasts,
    plain_ddp,
)
from foreprop.plan.profile import load_profile
from foreprop.plan.refined import predict
from foreprop.plan.whatif import Variable, parse_what_if, value_text, what_if


def test_every_architecture_and_preset_the_fastest_first() -> None:
    made = forecasts(setting(servers=(0, 1, 2, 4)))
    p3 = [f.candidate for f in made if f.candidate.preset == "p3" and f.candidate.servers]
    assert sorted(c.servers for c in p3) == [1, 2, 4]
    best = choose({f.candidate: f.step_s for f in made if f.candidate in p3}).servers
    expected = {Candidate("ddp"), Candidate("ring")}
    expected |= {Candidate("p2p", preset) for preset in PLANNED}
    expected |= {Candidate("ps", preset, best) for preset in PLANNED} | set(p3)
    assert {f.candidate for f in made} == expected
    assert len(made) == len(expected)
    assert [f.step_s for f in made] == sorted(f.step_s for f in made)


@pytest.mark.parametrize("candidate", [Candidate("ddp"), Candidate("p2p", "kvstore")])
def test_a_forecast_is_the_refined_models(candidate: Candidate) -> None:
    asked = setting(workers_per_node=2, batch=32)
    predicted = predict(
        Deployment(
            layers=SMALL.layers(scale=1, compute_s=0.14),
            architecture=candidate.architecture,
            preset=candidate.preset or "p3",
            nodes=4,
            workers_per_node=2,
            rate_bits_per_s=GBIT,
            latency_s=50e-6,
        )
    )
    made = forecast(asked, candidate)
    assert made.step_s == predicted.step_s == candidate_step_s(asked, candidate)
    assert (made.wire_s, made.saved_s) == (predicted.wire_s, predicted.saved_s)
    assert made.limited_by == predicted.limited_by
    assert made.efficiency == pytest.approx(0.14 / made.step_s)
    assert made.throughput == pytest.approx(8 * 32 / made.step_s)


def test_dedicated_servers_may_have_links_of_their_own() -> None:
    one = Candidate("ps", "p3", 1)
    slow = setting(servers=(1,))
    fast = replace(slow, server_rate_bits_per_s=10 * GBIT)
    assert candidate_step_s(fast, one) < 0.5 * candidate_step_s(slow, one)


def test_the_code_of_a_candidate_is_what_config_takes() -> None:
    def config(**settings: Any) -> Config:
        return Config.resolve(settings.pop("preset", None), **settings)

    for candidate in (
        Candidate("p2p", "p3"),
        Candidate("p2p", "wfbp"),
        Candidate("ring"),
        Candidate("hybrid"),
        Candidate("ps", "p3", 3),
        Candidate("ps", "kvstore", 1),
    ):
        code = candidate.code
        assert code.startswith("foreprop.parallelize(model, optimizer")
        settings = code.removeprefix("foreprop.parallelize(model, optimizer").lstrip(", ")
        made: Config = eval(f"config({settings}", {"config": config})
        assert made.dedicated_servers == candidate.servers
        if candidate.by_ring:
            assert made.architecture == candidate.architecture
        else:
            assert made.architecture is None
        for knob, value in PRESETS[candidate.preset or "p3"].items():
            assert getattr(made, knob) == value


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nodes": 1}, "nodes is 1; at least 2"),
        ({"nodes": 257}, "nodes is 257; at most 256"),
        ({"workers_per_node": 0}, "workers_per_node is 0; at least 1"),
        ({"batch": 0}, "batch is 0; at least 1"),
        ({"compute_s": 0.0}, "compute_s is 0.0; it must be positive"),
        ({"rate_bits_per_s": float("inf")}, "rate_bits_per_s is inf; it must be"),
        ({"server_rate_bits_per_s": 0.0}, "server_rate_bits_per_s is 0.0"),
        ({"servers": ()}, "servers is []"),
        ({"servers": (0, -1)}, "servers is [0, -1]"),
        ({"servers": (0, 1000)}, "servers has 1000; at most 256 are planned for, and more than"),
    ],
)
def test_a_setting_that_cannot_be_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        setting(**changes)
    assert told in str(raised.value)


def test_enough_servers_are_the_fewest_that_are_as_fast_as_any() -> None:
    asked = setting(rate_bits_per_s=0.3 * GBIT, servers=(0, 2, 4, 9))
    made = forecasts(asked)
    enough = enough_servers(made)
    assert enough == 4  # as many as nodes: then the workers' own links are what is left
    p3 = {f.candidate.servers: f.step_s for f in made if f.candidate.preset == "p3"}
    assert p3[9] >= p3[4] * (1 - 1e-3)
    assert p3[2] > 1.5 * p3[4]
    assert enough_servers(forecasts(setting())) == 0


# Tables with sparse gradients.
SPARSE = sparse_profile(alpha=0.1, rows=10_000)


def test_tables_are_sent_by_rows_wherever_that_can_be() -> None:
    asked = setting(profile=SPARSE, servers=(0, 2))
    assert asked.tables == [Table(0, 1_000_000, 100, 0.1), Table(13, 1_000_000, 100, 0.1)]
    assert [len(layer.sizes_elems) for layer in asked.layers] == [0, *[1] * 12, 0]
    made = {f.candidate for f in forecasts(asked)}
    expected = {Candidate("ddp"), Candidate("ddp", dense=True), Candidate("ring")}
    expected |= {Candidate("hybrid")} | {Candidate("p2p", preset) for preset in PLANNED}
    expected |= {Candidate("ps", preset, 2) for preset in PLANNED}
    assert made == expected


@pytest.mark.parametrize("candidate", [Candidate("ddp", dense=True), Candidate("hybrid")])
def test_a_forecast_of_tables_is_the_refined_models(candidate: Candidate) -> None:
    asked = setting(profile=SPARSE, workers_per_node=2)
    deployed = Deployment(
        layers=asked.layers,
        architecture=candidate.architecture,
        nodes=4,
        workers_per_node=2,
        rate_bits_per_s=GBIT,
        latency_s=50e-6,
        tables=[Table(0, 1_000_000, 100, 0.1), Table(13, 1_000_000, 100, 0.1)],
        dense_gradients=candidate.dense,
    )
    assert forecast(asked, candidate).step_s == predict(deployed).step_s


def test_an_array_of_which_a_step_touches_nearly_all_rows_is_no_table() -> None:
    """Rows of 400 bytes have 8 more for their numbers."""
    most, all_ = sparse_profile(alpha=0.97), sparse_profile(alpha=0.99)
    for nodes in (2, 8):
        assert len(setting(profile=most, nodes=nodes).tables) == 2
        assert setting(profile=all_, nodes=nodes).tables == []
    assert setting(profile=all_).layers == all_.layers(scale=1, compute_s=0.14)
    assert len(setting(profile=all_, nodes=2, workers_per_node=2).tables) == 2
    apart = setting(profile=most, nodes=2, workers_per_node=2, local_aggregation=False)
    assert apart.tables == []  # each worker's rows cross the node's link
    assert setting(profile=SMALL).tables == []  # nobody has counted


def test_with_dense_gradients_an_embedding_is_an_array_like_others() -> None:
    asked = setting(profile=SPARSE, dense_gradients=True)
    plain = [msgspec.structs.replace(array, alpha=None) for array in SPARSE.arrays]
    uncounted = setting(profile=replace(SPARSE, arrays=tuple(plain)))
    assert {f.candidate: f.step_s for f in forecasts(asked)} == {
        f.candidate: f.step_s for f in forecasts(uncounted)
    }
    assert Candidate("hybrid") not in {f.candidate for f in forecasts(asked)}
    assert asked.limit_s == uncounted.limit_s


def test_hybrid_needs_servers_beside_the_workers_and_something_to_reduce() -> None:
    dedicated = {f.candidate for f in forecasts(setting(profile=SPARSE, servers=(2,)))}
    assert Candidate("hybrid") not in dedicated
    only_tables = forecasts(setting(profile=sparse_profile(dense=0)))
    architectures = {f.candidate.architecture for f in only_tables}
    assert architectures == {"ddp", "ring", "p2p"}


def test_ddp_is_what_is_faster_of_gathered_rows_and_whole_tables() -> None:
    few, many = sparse_profile(alpha=0.02), sparse_profile(alpha=0.6)
    gathers, reduces = Candidate("ddp"), Candidate("ddp", dense=True)
    for profile, nodes, faster in ((few, 4, gathers), (many, 8, reduces)):
        asked = setting(profile=profile, nodes=nodes)
        steps_s = {c: candidate_step_s(asked, c) for c in (gathers, reduces, Candidate("ring"))}
        assert plain_ddp(steps_s) == faster


def test_of_a_table_the_limit_counts_touched_rows_only() -> None:
    slow = 0.01 * GBIT
    bytes_ = 12 * 800_000 + 2 * 0.1 * 4e6
    wire_s = 1514 / 1448 * 2 * 3 / 4 * bytes_ * 8 / slow
    asked = setting(profile=SPARSE, rate_bits_per_s=slow)
    assert asked.limit_s == pytest.approx(wire_s, rel=0.01)
    assert setting(profile=SPARSE, rate_bits_per_s=1e15).limit_s == pytest.approx(0.14)


@settings(max_examples=10, deadline=None)
@given(
    alpha=st.floats(0, 1),
    nodes=st.integers(2, 6),
    rate=st.floats(0.02, 20),
    dense=st.integers(0, 3),
    workers_per_node=st.integers(1, 3),
)
@example(alpha=1.8739774477841814e-9, nodes=2, rate=0.02, dense=1, workers_per_node=3)
def test_nothing_without_dedicated_servers_beats_the_limit(
    alpha: float, nodes: int, rate: float, dense: int, workers_per_node: int
) -> None:
    asked = setting(
        profile=sparse_profile(alpha=alpha, rows=500, dense=dense),
        nodes=nodes,
        workers_per_node=workers_per_node,
        rate_bits_per_s=rate * GBIT,
    )
    for made in forecasts(asked):
        assert made.step_s >= asked.limit_s * (1 - 1e-6), made.candidate.name


def test_curves_have_the_same_systems_where_a_table_is_one_on_few_nodes_only() -> None:
    asked = setting(profile=sparse_profile(alpha=0.99, dense=2), workers_per_node=2)
    curves = what_if(asked, "nodes", [2, 32])
    assert curves.candidates == ["ddp", "ddp dense", "ring", "hybrid", "p2p p3"]
    on_two, on_many = (
        dict(zip(curves.candidates, point.steps_s, strict=True)) for point in curves.points
    )
    assert on_two["ddp"] > on_two["ddp dense"]
    assert on_two["ring"] > on_two["hybrid"]
    assert on_many["ddp"] == on_many["ddp dense"]
    assert on_many["ring"] == on_many["hybrid"]


# What if.
@pytest.mark.parametrize(
    ("text", "variable", "values"),
    [
        ("rate=1Gbit..10Gbit", "rate", [1e9, 1.5e9, 2e9, 3e9, 5e9, 7e9, 10e9]),
        ("rate=10Gbit,800Mbit", "rate", [800e6, 10e9]),
        ("nodes=2..6", "nodes", [2, 3, 4, 5, 6]),
        ("nodes=2..64", "nodes", [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        ("nodes=5..20", "nodes", [5, 6, 8, 12, 16, 20]),
        ("servers=1..8", "servers", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("latency=0us..80us", "latency", [n * 1e-5 for n in range(9)]),
        ("compute=100ms..180ms", "compute", [0.1 + n / 100 for n in range(9)]),
        ("rate=1.45Gbit..7.2Gbit", "rate", [1.45e9, 2e9, 3e9, 5e9, 7.2e9]),
    ],
)
def test_ranges_are_taken_at_round_values(
    text: str, variable: Variable, values: list[float]
) -> None:
    assert parse_what_if(text)[0] == variable
    assert parse_what_if(text)[1] == pytest.approx(values)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("speed=1..2", "what_if is 'speed=1..2'; it must be one of rate, latency"),
        ("nodes", "what_if is 'nodes'; it must be one of"),
        ("rate=1..10", "what_if's rate is '1'; it must be a number with its unit"),
        ("rate=9Gbit..1Gbit", "from the smaller to the larger"),
        ("nodes=", "what_if's nodes is ''"),
        ("rate=1bit..100Tbit", "points; at most 24"),
    ],
)
def test_a_range_that_is_none_is_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_what_if(text)
    assert told in str(raised.value)


def test_curves_are_those_of_a_setting_with_that_value() -> None:
    asked = setting(servers=(0, 1, 3))
    curves = what_if(asked, "rate", [0.3e9, 1e9, 20e9])
    names = ["ddp", "ring", "p2p p3", "ps p3, 3 servers"]
    candidates = [Candidate("ddp"), Candidate("ring"), Candidate("p2p", "p3")]
    candidates.append(Candidate("ps", "p3", 3))
    assert curves.candidates == names
    assert curves.asked == 1e9
    assert curves.unit == "bit/s"
    for point in curves.points:
        there = replace(asked, rate_bits_per_s=point.value)
        steps_s = {c: candidate_step_s(there, c) for c in candidates}
        assert point.steps_s == list(steps_s.values())
        assert point.throughputs == [4 / seconds for seconds in steps_s.values()]
        assert point.recommended == choose(steps_s).name
        assert point.ideal == pytest.approx(4 / 0.14)
        assert max(point.throughputs) <= point.ideal * (1 + 1e-9)
    assert curves.points[0].recommended == "ps p3, 3 servers"
    assert curves.points[-1].recommended == "ddp"


@pytest.mark.parametrize(
    ("variable", "values", "field"),
    [
        ("latency", [0.0, 0.01], "latency_s"),
        ("compute", [0.1, 0.2], "compute_s"),
        ("nodes", [2, 5], "nodes"),
    ],
)
def test_each_variable_changes_its_own_field(
    variable: Variable, values: list[float], field: str
) -> None:
    asked = setting()
    curves = what_if(asked, variable, values)
    assert [p.value for p in curves.points] == values
    assert curves.asked == getattr(asked, field)
    for point in curves.points:
        there = setting(**{field: type(getattr(asked, field))(point.value)})
        assert point.steps_s[0] == candidate_step_s(there, Candidate("ddp"))
        assert point.throughputs[0] == there.workers / point.steps_s[0]


def test_numbers_of_servers_are_a_curve_of_their_own() -> None:
    asked = setting(rate_bits_per_s=0.3e9)
    curves = what_if(asked, "servers", [1, 2, 4])
    assert curves.candidates[-1] == "ps p3"
    assert [p.steps_s[-1] for p in curves.points] == [
        candidate_step_s(asked, Candidate("ps", "p3", k)) for k in (1, 2, 4)
    ]
    assert len({p.steps_s[2] for p in curves.points}) == 1
    with pytest.raises(ConfigError, match="what_if's servers has 0"):
        what_if(asked, "servers", [0, 1])


def test_a_value_that_cannot_be_is_told_before_any_work() -> None:
    seen: list[str] = []
    with pytest.raises(ConfigError, match="nodes is 1"):
        what_if(setting(), "nodes", [4, 1], progress=seen.append)
    assert not seen


def test_values_have_their_units() -> None:
    assert value_text("rate", 1.5e9) == "1.5 Gbit/s"
    assert value_text("latency", 50e-6) == "50 us"
    assert value_text("nodes", 8.0) == "8"


def test_resnet_on_eight_nodes_wants_p3_at_10_gbit_and_ddp_at_50() -> None:
    """A real model: what docs/plan.md shows."""
    fields: dict[str, Any] = {"profile": load_profile("resnet50"), "compute_s": 0.18, "nodes": 8}
    for rate, best in ((10e9, Candidate("p2p", "p3")), (50e9, Candidate("ddp"))):
        asked = setting(**fields, rate_bits_per_s=rate)
        candidates = (Candidate("ddp"), Candidate("ring"), Candidate("p2p", "p3"))
        assert choose({c: candidate_step_s(asked, c) for c in candidates}) == best
