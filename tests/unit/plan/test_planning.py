"""What a session that plans for itself goes on with: decided by predictions, alike on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_example import SMALL, setting

from foreprop.config import PRESETS, Config
from foreprop.engine.rendezvous import Board
from foreprop.engine.world import solitary_world
from foreprop.errors import TransportError
from foreprop.plan import planning
from foreprop.plan.deployment import ACKNOWLEDGED
from foreprop.plan.limit import HEADER_FACTOR
from foreprop.plan.linkprobe import Report, conclude, exchange_reports, rates_of_nodes
from foreprop.plan.planner import Candidate, deployment_of
from foreprop.plan.planning import Outlook, Plan, plan_session, preset_of
from foreprop.plan.profile import Profile, ProfiledArray, load_profile
from foreprop.plan.refined import CANDIDATES, choose_slice_elems, slices_of, step_s

AUTO, SLICES = Config(architecture="auto"), Config(slice_elems="auto")


# Which architecture.
def test_p3_is_gone_on_with_where_it_is_as_fast_as_any() -> None:
    plan = plan_session(setting(), AUTO, ())
    assert plan.architecture == "p2p"
    assert plan.slice_elems is None
    assert plan.applied_to(AUTO) == AUTO.replace(architecture="p2p")
    assert "goes on with p2p p3, predicted" in plan.text
    assert "DDP would be as good" not in plan.text


def test_the_ring_is_gone_on_with_where_the_preset_is_slower() -> None:
    kvstore = Config.resolve("kvstore", architecture="auto")
    plan = plan_session(setting(rate_bits_per_s=0.5e9), kvstore, ())
    assert plan.architecture == "ring"
    assert plan.applied_to(kvstore).architecture == "ring"
    assert "p2p kvstore" in plan.text.partition("predicted")[2]


def test_with_rows_on_servers_the_other_way_is_hybrid() -> None:
    kvstore = Config.resolve("kvstore", architecture="auto")
    plan = plan_session(setting(rate_bits_per_s=0.5e9), kvstore, {"words"}, "a table")
    assert plan.architecture == "hybrid"
    assert plan.row_wise == {"words"}
    assert plan.text.startswith("a table\n")


def test_what_a_node_s_relays_take_counts_against_servers() -> None:
    fast = {"rate_bits_per_s": 25e9, "compute_s": 0.02}
    assert plan_session(setting(**fast), AUTO, ()).architecture == "p2p"
    assert plan_session(setting(**fast, workers_per_node=8), AUTO, ()).architecture == "ring"


def test_that_plain_ddp_would_be_as_good_is_told() -> None:
    plan = plan_session(setting(rate_bits_per_s=100e9), AUTO, ())
    assert plan.architecture == "p2p"
    assert plan.text.endswith("plain DDP would be as good")


@pytest.mark.parametrize("name", ["compression", "slice_elems"])
def test_what_workers_update_is_planned_for_as_any_other(name: str) -> None:
    """SparseAdam's tables in a session of their own, or Muon."""
    config = Config(**{name: "auto:lossless" if name == "compression" else "auto"})  # type: ignore[arg-type]
    plan = plan_session(setting(), config, (), servable=False)
    assert plan.architecture is None
    assert "goes on with p2p p3, predicted" in plan.text


def test_without_automatic_architecture_only_slices_are_chosen() -> None:
    config = Config(slice_elems="auto")
    plan = plan_session(setting(), config, ())
    assert plan.architecture is None
    assert plan.slice_elems in CANDIDATES
    assert f"slices of {plan.slice_elems:,} elements" in plan.text
    assert plan.applied_to(config).slice_elems == plan.slice_elems


@pytest.mark.parametrize("name", PRESETS)
def test_the_preset_is_known_by_its_knobs(name: str) -> None:
    assert preset_of(Config.resolve(name)) == name
    assert preset_of(Config.resolve(name, reply="notify", order="priority")) in ("p3", name)


@pytest.mark.long
def test_of_a_table_only_the_rows_count_that_a_step_touches() -> None:
    words = ProfiledArray(
        name="words", shape=(10_000_000, 64), forward_s=0.0, backward_s=0.0, alpha=1e-5
    )
    timed = [
        msgspec.structs.replace(array, forward_flops=None, forward_s=0.004, backward_s=0.007)
        for array in SMALL.arrays
    ]
    without = Profile(name="dense", arrays=tuple(timed))
    with_words = Profile(name="words", arrays=(words, *timed))
    both = Config(architecture="auto", slice_elems="auto")
    dense, sparse = (
        plan_session(setting(profile=profile), both, rows)
        for profile, rows in ((without, ()), (with_words, {"words"}))
    )
    assert sparse.slice_elems in (dense.slice_elems, dense.slice_elems // 2)  # both as good
    assert sparse.step_s == pytest.approx(dense.step_s, rel=0.05)
    assert "hybrid" in sparse.text


# Which slices.
def chosen(config: Config = SLICES, **changes: Any) -> int:
    return choose_slice_elems(deployment_of(setting(**changes), Candidate("p2p", "p3"), config))


def steps_s(**changes: Any) -> dict[int, float]:
    asked = deployment_of(setting(**changes), Candidate("p2p", "p3"), SLICES)
    return {size: step_s(replace(asked, slice_elems=size)) for size in CANDIDATES}


def test_the_smallest_size_is_chosen_that_hosts_have_time_for() -> None:
    found_s = steps_s()
    assert found_s[chosen()] <= 1.01 * min(found_s.values())
    assert all(
        found_s[size] > 1.01 * min(found_s.values()) for size in CANDIDATES if size < chosen()
    )
    assert chosen(rate_bits_per_s=25e9, compute_s=0.005) > chosen()


def test_the_sessions_settings_count_not_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = chosen()
    monkeypatch.setenv("FOREPROP_SERVERS_PER_NODE", "2")
    monkeypatch.setenv("FOREPROP_DEDICATED_SERVERS", "1")
    monkeypatch.setenv("FOREPROP_ORDER", "fifo")
    monkeypatch.setenv("FOREPROP_WIRE_DTYPE", "float16")
    assert chosen() == before


@pytest.mark.long
def test_many_nodes_ask_for_smaller_slices() -> None:
    """48 slices of 50,000 elements leave most of 64 servers idle (lab/docs/scale.md)."""
    many_s = steps_s(nodes=64)
    assert chosen(nodes=64) < 50_000
    assert many_s[chosen(nodes=64)] < 0.95 * many_s[50_000]


def test_a_large_model_is_not_cut_into_more_slices_than_hosts_can_do() -> None:
    layers = setting().layers
    assert slices_of(layers, 50_000) == 12 * 4
    assert slices_of(layers, 200_000) == 12
    array = ProfiledArray(name="words.weight", shape=(2_000_000, 100), forward_flops=1e6)
    assert chosen(profile=Profile(name="large", arrays=(array,))) >= 50_000


# Links.
def reports(*rates: float, error: str | None = None) -> list[Any]:
    return [Report(rate, 1e-4, error) for rate in rates]


def test_the_slowest_link_counts_with_headers() -> None:
    links = conclude(reports(9e9, 5e9, 8e9))
    assert links.rate_bits_per_s == pytest.approx(5e9 * (HEADER_FACTOR + ACKNOWLEDGED))
    assert links.latency_s == pytest.approx(5e-5)


def flows(up: list[float], down: list[float]) -> tuple[list[float], list[float]]:
    """What is measured from every node to the next one, and to the one before."""
    nodes = range(len(up))
    forth = [min(up[node], down[(node + 1) % len(up)]) for node in nodes]
    return forth, [min(up[node], down[node - 1]) for node in nodes]


def test_a_link_counts_as_its_slower_direction() -> None:
    """A second job's traffic leaves more of one direction than of the other."""
    assert rates_of_nodes(*flows([77, 77, 77, 53], [77, 77, 77, 46])) == (1, 1, 1, 0.6)
    assert rates_of_nodes(*flows([77, 77, 77, 46], [77, 77, 77, 53])) == (1, 1, 1, 0.6)


@given(st.lists(st.floats(0.1, 0.8), min_size=2, max_size=2), st.integers(0, 4))
def test_a_slow_link_is_told_from_its_neighbours(slow: list[float], node: int) -> None:
    up, down = [1.0] * 5, [1.0] * 5
    up[node], down[node] = slow
    rates = rates_of_nodes(*flows(up, down))
    assert [rate < 1 for rate in rates] == [other == node for other in range(5)]
    assert rates[node] == round(min(slow), 2)


def test_links_that_are_nearly_alike_are_alike() -> None:
    assert rates_of_nodes([9e9, 8e9, 8.5e9], [9e9, 8e9, 8.5e9]) == (1, 1, 1)


def test_links_that_are_faster_than_the_pace_are_alike() -> None:
    both = zip(*flows([9, 4, 9], [9, 4, 9]), strict=True)
    told = [Report(rate, 1e-4, sent_back_bits_per_s=back) for rate, back in both]
    assert conclude(told).node_rates == (1, 0.44, 1)
    assert conclude(told, paced_bits_per_s=8).node_rates == (1, 0.5, 1)
    assert conclude(told, paced_bits_per_s=3).node_rates == (1, 1, 1)


def test_servers_own_what_suits_links_that_differ() -> None:
    even = plan_session(setting(nodes=4, rate_bits_per_s=1e9), Config(architecture="auto"), ())
    rates = (1.0, 1.0, 1.0, 0.5)
    slow = setting(nodes=4, rate_bits_per_s=1e9)
    plan = plan_session(slow, Config(architecture="auto"), (), node_rates=rates)
    assert plan.architecture == "p2p"
    assert plan.node_rates == "3:0.5"
    assert "node_rates=3:0.5" in plan.text
    assert plan.applied_to(Config(architecture="auto")).shares(4) == (3333, 3333, 3333, 0)
    assert even.node_rates is None
    given = Config(architecture="p2p", slice_elems="auto", node_rates="3:0.7")
    assert plan_session(slow, given, (), node_rates=rates).node_rates is None


def test_servers_of_nodes_that_compute_for_longer_own_less_where_it_pays() -> None:
    late, even = (1.0, 1.0, 1.0, 1.5), (1.0,) * 4
    profile = load_profile("sockeye")  # whose first layer is the largest
    slow = setting(profile=profile, nodes=4, compute_s=1.5, rate_bits_per_s=1.33e9)

    def plan(computed_s: Sequence[float], **settings: Any) -> Plan:
        config = Config(architecture="p2p", slice_elems=50_000, **settings)
        return plan_session(slow, config, (), computed_s=computed_s)

    found = plan(late)
    assert found.late_nodes == "3"
    assert "late_nodes=3" in found.text
    assert found.applied_to(Config()).shares(4) == (2917, 2917, 2917, 1250)
    assert plan(even).late_nodes is None
    assert plan(late, late_nodes="2").late_nodes is None  # a setting says it


def test_who_could_not_measure_is_told() -> None:
    with pytest.raises(TransportError, match="node 0 could not measure its links: no route"):
        conclude(reports(1e9, error="no route"))


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, 3])
def test_all_nodes_measure_and_agree(nodes: int) -> None:
    board = Board(solitary_world(), "plan", timeout_s=20)

    def measure(node: int) -> Any:
        about = {"node": node, "nodes": nodes}
        return conclude(exchange_reports(board, address="127.0.0.1", session="abc", **about))

    began_s = time.monotonic()
    with ThreadPoolExecutor(nodes) as pool:
        found = list(pool.map(measure, range(nodes)))
    took_s = time.monotonic() - began_s
    assert found.count(found[0]) == nodes
    assert found[0].rate_bits_per_s > 1e7
    assert 0 < found[0].latency_s < took_s / 10  # there and back, several times


# How it went.
def test_predicted_and_measured_are_told_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(1000))
    monkeypatch.setattr(planning.time, "perf_counter", lambda: 0.2 * next(moments))
    outlook = Plan(frozenset(), step_s=0.19).outlook()
    assert outlook is not None
    told = [outlook.end_step() for _ in range(Outlook.STEPS + 1)]
    assert told[:-1] == [None] * Outlook.STEPS
    assert told[-1] == "50 steps took 200 ms each in the median, predicted were 190 ms (-5.0%)"
    assert outlook.is_over
    assert Plan(frozenset()).outlook() is None


def test_a_plan_crosses_the_store() -> None:
    plan = Plan(frozenset({"a"}), "p2p", 6250, 0.2, "text")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
