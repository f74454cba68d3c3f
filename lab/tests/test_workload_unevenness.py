"""What makes nodes, steps and links differ: drawn once for the lab, the simulator and the limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from foreprop.errors import ConfigError
from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop.tools.cli.app import app
from foreprop.tools.compare.result import write_records
from foreprop_lab.lab import run
from foreprop_lab.lab.accelerator import EmulatedModel
from foreprop_lab.lab.network import NetworkUnavailable
from foreprop_lab.lab.run import run_lab
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import LabSetting, environment_text, foreprop_config
from foreprop_lab.setting.links import (
    CrossTraffic,
    LinkRate,
    LinkSetting,
    Network,
    SharedDirection,
    parse_cross_traffic,
    parse_link_rates,
)
from foreprop_lab.setting.records import read_records
from foreprop_lab.setting.unevenness import (
    StepLengths,
    Unevenness,
    parse_staleness,
    parse_step_lengths,
)
from foreprop_lab.simulate.run import simulate_lab, simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

SMALL = Profile(
    name="small",
    arrays=tuple(
        ProfiledArray(name=f"{i}.weight", shape=(elems,), forward_flops=elems)
        for i, elems in enumerate((3_000, 40_000, 90_000))
    ),
)
LAYERS = SMALL.layers(scale=1, compute_s=0.3)
UNEVEN: dict[str, Any] = {
    "slow_nodes": 1,
    "slowdown": 0.5,
    "jitter": 0.2,
    "step_jitter": 0.1,
    "step_lengths": StepLengths(distribution="lognormal", spread=0.4),
}
LINKS: dict[str, Any] = {
    "link_rates": (LinkRate(node=2, factor=0.5),),
    "cross_traffic": (CrossTraffic(node=1, share=0.4, period_s=0.2, duty=0.5),),
}


def simulated(*systems: str, **changes: Any) -> SimulatedSetting:
    fields: dict[str, Any] = {"profile": SMALL, "systems": systems or ("p3",), "nodes": 3}
    fields |= {"scale": 1, "slice_elems": 5_000, "compute_s": 0.2, "iterations": 3, "warm_up": 1}
    return SimulatedSetting(**(fields | changes))


@pytest.mark.parametrize("workers_per_node", [1, 2])
@pytest.mark.parametrize("system", ["p3", "ring"])
def test_the_lab_and_the_simulator_compute_the_same_times(
    system: str, workers_per_node: int
) -> None:
    asked = simulated(system, workers_per_node=workers_per_node, balance=0.5, **UNEVEN)
    steps = simulate_system(system, asked, Hosts(), steps=4, first_step=-1)
    lab = LabSetting(
        profile=SMALL,
        systems=(system,),
        nodes=3,
        workers_per_node=workers_per_node,
        scale=1,
        compute_s=0.2,
        **UNEVEN,
    )
    for rank in range(3 * workers_per_node):
        model = EmulatedModel(lab.layers, lab.draw([rank]))
        for place, number in enumerate(range(-1, 3)):
            model.begin_step(number)
            in_lab_s = sum(layer.forward_s + layer.backward_s for layer in model.children())  # type: ignore[operator]
            computed_s = steps.step_s[rank][place] - steps.waited_s[rank][place]
            assert computed_s == pytest.approx(in_lab_s)


def test_all_systems_have_the_same_times_in_the_steps_that_count() -> None:
    """Whatever they warm up for: with next to no bytes and one node slow, all take what it does."""
    asked = simulated("p3", "ring", "ddp", balance=1e-4, step_jitter=0.3, iterations=6, warm_up=4)
    records = simulate_lab(asked)
    means = [record.mean_s for record in records]
    assert means == pytest.approx([means[0]] * 3, rel=0.02)
    assert all(0.97 < record.efficiency < 1.05 for record in records)


def test_what_is_drawn_depends_on_seed_rank_and_step_only() -> None:
    uneven = Unevenness(jitter=0.2, step_jitter=0.3)
    all_ranks = uneven.draw(LAYERS, range(5), nodes=5)
    one = uneven.draw(LAYERS, [3], nodes=5)
    assert np.array_equal(one(7)[0], all_ranks(7)[3])
    assert np.array_equal(one(-2), one(-2))
    other = Unevenness(jitter=0.2, step_jitter=0.3, seed=1).draw(LAYERS, [3], nodes=5)
    for different in (other(7), one(8), uneven.draw(LAYERS, [2], nodes=5)(7)):
        assert not np.isclose(one(7), different).any()


def test_a_node_s_workers_share_its_step_jitter_but_not_their_sequences() -> None:
    for changes, alike in (({"step_jitter": 0.3}, True), ({"step_lengths": _LENGTHS}, False)):
        draw = Unevenness(**changes).draw(LAYERS, range(4), nodes=2, workers_per_node=2)  # type: ignore[arg-type]
        times = draw(1)
        assert np.allclose(times[0], times[1]) == alike
        assert not np.isclose(times[0], times[2]).any()
        ratios = times[0] / [(layer.forward_s, layer.backward_s) for layer in LAYERS]
        assert np.allclose(ratios, ratios[0, 0])  # the whole step's


_LENGTHS = StepLengths(distribution="uniform", spread=0.4)


@pytest.mark.parametrize(
    ("text", "deviation", "least"),
    [
        ("lognormal:0.4", math.sqrt(math.exp(0.16) - 1), 0.0),
        ("uniform:0.3", 0.3 / math.sqrt(3), 0.7),
        ("exponential:0.5", 0.5, 0.5),
    ],
)
def test_sequences_have_mean_1_and_the_spread(text: str, deviation: float, least: float) -> None:
    layer = Layer(name="a", sizes_elems=(1,), forward_s=1.0, backward_s=1.0)
    draw = Unevenness(step_lengths=parse_step_lengths(text)).draw([layer], range(100), nodes=100)
    drawn = np.concatenate([draw(step)[:, 0, 0] for step in range(200)])
    assert drawn.mean() == pytest.approx(1.0, abs=0.02)
    assert drawn.std() == pytest.approx(deviation, rel=0.05)
    assert drawn.min() >= least


def test_slow_nodes_are_the_last_ones() -> None:
    times = Unevenness(slow_nodes=2, slowdown=0.5).draw(LAYERS, range(4), nodes=4)(1)
    ratios = times.sum(axis=(1, 2)) / sum(layer.forward_s + layer.backward_s for layer in LAYERS)
    assert ratios == pytest.approx([1.0, 1.0, 1.5, 1.5])


def test_without_unevenness_nothing_differs() -> None:
    even = simulated("p3", slow_nodes=1, slowdown=0.0, seed=5)
    assert even.is_even
    assert not even.uneven
    encoded = simulate_lab(even)[0].__struct_fields__
    assert {"uneven", "mean_s", "environment"} <= set(encoded)


def test_records_keep_what_differs(tmp_path: Path) -> None:
    records = simulate_lab(simulated("p3", "ring", **UNEVEN, **LINKS, seed=3))
    path = tmp_path / "results.json"
    write_records(path, records)
    assert read_records(path) == records
    assert records[0].uneven == {
        "slow_nodes": 1,
        "slowdown": 0.5,
        "jitter": 0.2,
        "step_jitter": 0.1,
        "step_lengths": {"distribution": "lognormal", "spread": 0.4},
        "seed": 3,
        "link_rates": [{"node": 2, "factor": 0.5, "rate_bits_per_s": None}],
        "cross_traffic": [{"node": 1, "share": 0.4, "period_s": 0.2, "duty": 0.5}],
    }
    assert records[0].efficiency == records[0].limit_s / records[0].typical_s
    write_records(path, simulate_lab(simulated("p3")))
    assert not any(name in path.read_text() for name in ("uneven", "mean_s", "environment"))


@pytest.mark.parametrize("system", ["p3", "slicing", "ring", "ddp"])
def test_a_slow_link_holds_all_of_them_up(system: str) -> None:
    alike, slow = (
        simulate_lab(simulated(system, balance=1.0, **changes))[0]
        for changes in ({}, {"link_rates": (LinkRate(node=1, factor=0.5),)})
    )
    assert slow.wire_s == alike.wire_s
    assert slow.limit_s > 1.25 * alike.limit_s  # if its server owns nothing
    most_s = 4 / 3 * slow.limit_s  # as it owns a third
    assert slow.limit_s <= slow.iteration_s.median < 1.3 * most_s + 0.1


def test_cross_traffic_takes_its_share() -> None:
    asked = simulated("p3", "ring", balance=4.0, iterations=8)
    records = {}
    for share, duty in ((0.5, 1.0), (0.5, 0.5)):
        traffic = (CrossTraffic(node=0, share=share, period_s=0.05, duty=duty),)
        changed = simulated("p3", "ring", balance=4.0, iterations=8, cross_traffic=traffic)
        records[duty] = simulate_lab(changed)
    for place, alone in enumerate(simulate_lab(asked)):
        always, half = records[1.0][place], records[0.5][place]
        assert always.typical_s == pytest.approx(2 * alone.typical_s, rel=0.15)
        assert half.typical_s == pytest.approx(alone.typical_s / 0.75, rel=0.15)
        assert always.efficiency <= 1.0
        assert half.efficiency <= 1.0


@given(
    st.floats(0.05, 0.95),
    st.floats(0.01, 10.0),
    st.floats(0.05, 1.0),
    st.floats(-20.0, 200.0),
    st.floats(0.0, 50.0),
)
def test_work_beside_cross_traffic(
    share: float, period_s: float, duty: float, begins_s: float, work_s: float
) -> None:
    traffic = CrossTraffic(node=0, share=share, period_s=period_s, duty=duty)
    ends_s = traffic.time_s(traffic.work_s(begins_s) + work_s)
    assert traffic.work_s(ends_s) - traffic.work_s(begins_s) == pytest.approx(work_s, abs=1e-6)
    assert work_s - 1e-6 <= traffic.least_s(work_s) <= ends_s - begins_s + 1e-6


def test_bytes_beside_cross_traffic_leave_later() -> None:
    setting = LinkSetting(rate_bits_per_s=8e3, latency_s=0.0, burst_bytes=0, queue_bytes=1e9)
    traffic = CrossTraffic(node=0, share=0.5, period_s=2.0, duty=0.5)
    link = SharedDirection(setting, traffic)
    assert link.accept(0.0, 500) == pytest.approx(1.0)  # half of the rate for the first second
    assert link.accept(0.0, 1000) == pytest.approx(2.0)
    assert link.accept(5.0, 1500) == pytest.approx(7.0)
    assert link.carried_bytes == 3000


def test_links_by_node() -> None:
    rates = parse_link_rates("3:0.5,1:40Mbit")
    network = Network(nodes=4, rate_bits_per_s=100e6, link_rates=rates)
    assert [network.rate_of(node) for node in range(4)] == [100e6, 40e6, 100e6, 50e6]
    assert network.bucket(0) == network.bucket()
    assert network.bucket(3)[1] < network.bucket(0)[1]
    traffic = parse_cross_traffic("0:0.4,2:0.5:200ms:0.25")
    assert traffic == (
        CrossTraffic(node=0, share=0.4),
        CrossTraffic(node=2, share=0.5, period_s=0.2, duty=0.25),
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--link-rates", "3", "--link-rates has '3'; it must be NODE:FACTOR or NODE:RATE"),
        ("--link-rates", "x:0.5", "--link-rates is 'x'; it must be a whole number"),
        ("--link-rates", "1:fast", "--link-rates is 'fast'; it must be a number with its unit"),
        ("--link-rates", "1:0", "--link-rates has 0.0 for node 1; it must be positive and finite"),
        ("--link-rates", "7:0.5", "--link-rates has node 7; there are 0 to 3"),
        ("--link-rates", "1:0.5,1:0.6", "--link-rates names node 1 twice"),
        ("--cross-traffic", "1", "--cross-traffic has '1'; it must be NODE:SHARE or"),
        ("--cross-traffic", "1:0.4:2s", "--cross-traffic has '1:0.4:2s'; it must be NODE:SHARE or"),
        (
            "--cross-traffic",
            "1:1",
            "--cross-traffic has the share 1 for node 1; it must be above",
        ),
        ("--cross-traffic", "1:0.4:2:0.5", "--cross-traffic is '2'; it must be a number with its"),
        ("--cross-traffic", "1:0.4:2s:0", "--cross-traffic has the duty 0 for node 1; it must be"),
        ("--cross-traffic", "4:0.4", "--cross-traffic has node 4; there are 0 to 3"),
        ("--step-lengths", "normal:1", "--step-lengths has 'normal'; there are lognormal, uniform"),
        ("--step-lengths", "lognormal", "--step-lengths is 'lognormal'; it must be a distribution"),
        ("--step-lengths", "uniform:1", "--step-lengths has the spread 1; of uniform it must be"),
        ("--slow-nodes", "4", "--slow-nodes is 4; it must be at least 0 and below nodes, 4"),
        ("--slowdown", "-1", "--slowdown is -1.0; it must be finite and at least 0"),
        ("--step-jitter", "-1", "--step-jitter is -1.0; it must be finite and at least 0"),
        ("--jitter", "1", "--jitter is 1.0; it must be at least 0 and below 1"),
        ("--seed", "-1", "--seed is -1; it must be at least 0"),
    ],
)
@pytest.mark.parametrize("command", ["run", "simulate"])
def test_wrong_values_are_refused_by_their_option(
    command: str, option: str, value: str, message: str, tmp_path: Path
) -> None:
    arguments = ["lab", command, "--nodes", "4", "--out", str(tmp_path), option, value]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"foreprop: {message}" in result.stderr


def test_uneven_links_are_simulated_node_by_node() -> None:
    for name, value in LINKS.items():
        with pytest.raises(ConfigError, match=f"symmetric is True, but {name} makes links differ"):
            simulated("p3", symmetric=True, **{name: value})
        assert not simulated("p3", nodes=100, **{name: value}).is_symmetric
        with pytest.raises(ConfigError, match="representatives is 2, but nodes whose links differ"):
            simulated("p3", representatives=2, **{name: value})


@pytest.mark.parametrize("name", ["slow_nodes", "step_jitter", "step_lengths"])
def test_mxnet_is_only_measured_with_even_nodes(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*; mxnet-\* can only be measured without"):
        LabSetting(
            profile=SMALL,
            systems=("mxnet-p3",),
            mxnet_python=Path("python"),
            **{name: UNEVEN[name]},
        )


def test_cross_traffic_needs_links_made_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise NetworkUnavailable("no namespaces")

    monkeypatch.setattr(run, "_cluster", unavailable)
    asked = LabSetting(profile=SMALL, systems=("p3",), cross_traffic=LINKS["cross_traffic"])
    with pytest.raises(ConfigError, match="cross_traffic needs links made by the kernel"):
        run_lab(asked)


# Settings in the environment.
def test_the_environment_comes_before_what_the_lab_derives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = simulated("p3", scale=4, slice_elems=None)
    usual = foreprop_config("p3", asked)
    assert environment_text(asked) == ""
    monkeypatch.setenv("FOREPROP_PUSH_WINDOW_BYTES", "4000000")
    monkeypatch.setenv("FOREPROP_UNSENT_BYTES", "40000")
    monkeypatch.setenv("FOREPROP_SLICE_ELEMS", "20000")
    monkeypatch.setenv("FOREPROP_BIG_ARRAY_ELEMS", "400")
    monkeypatch.setenv("FOREPROP_CHUNK_ELEMS", "8000")
    monkeypatch.setenv("FOREPROP_ARCHITECTURE", "ring")
    config = foreprop_config("p3", asked)
    assert (config.push_window_bytes, config.unsent_bytes) == (1_000_000, 10_000)
    assert (config.slice_elems, config.big_array_elems, config.chunk_elems) == (5_000, 100, 2_000)
    assert config.architecture == usual.architecture == "p2p"
    assert environment_text(asked) == (
        "From the environment: big_array_elems=400 (/ 4), chunk_elems=8000 (/ 4),"
        " push_window_bytes=4000000 (/ 4), slice_elems=20000 (/ 4), unsent_bytes=40000 (/ 4);"
        " not used, for systems or options say it: architecture"
    )
    record = simulate_lab(asked)[0]
    assert record.slice_elems == 5_000
    assert record.environment == {
        "big_array_elems": 400,
        "chunk_elems": 8000,
        "push_window_bytes": 4_000_000,
        "slice_elems": 20_000,
        "unsent_bytes": 40_000,
    }


def test_an_option_and_a_name_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_SLICE_ELEMS", "20000")
    asked = simulated("p3", "p3@8000", slice_elems=4_000, scale=4)
    assert foreprop_config("p3", asked).slice_elems == 1_000
    assert foreprop_config("p3@8000", asked).slice_elems == 2_000
    assert foreprop_config("auto", asked).slice_elems == "auto"
    assert foreprop_config("p3", asked, slice_elems=77).slice_elems == 77
    assert "not used, for systems or options say it: slice_elems" in environment_text(asked)


def test_slices_to_be_found_are_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_SLICE_ELEMS", "auto")
    with pytest.raises(ConfigError, match="FOREPROP_SLICE_ELEMS is 'auto', which the systems auto"):
        simulate_lab(simulated("p3", slice_elems=None))


def test_a_larger_window_changes_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = simulated("p3", "ring", balance=2.0, slow_nodes=1, slowdown=0.5)
    usual = [record.iteration_s for record in simulate_lab(asked)]
    monkeypatch.setenv("FOREPROP_PUSH_WINDOW_BYTES", "20000")
    smaller = [record.iteration_s for record in simulate_lab(asked)]
    assert smaller[0] != usual[0]
    assert smaller[1] == usual[1]


def test_the_command_says_what_came_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREPROP_PUSH_WINDOW_BYTES", "3000000")
    options = "--model resnet110_cifar --systems p3 --steps 1 --link-rates 3:0.5 --seed 2"
    options += " --cross-traffic 1:0.4:200ms:0.5 --step-lengths lognormal:0.2 --slow-nodes 1"
    arguments = ["lab", "simulate", *options.split(), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "From the environment: push_window_bytes=3000000 (/ 16)" in result.output
    record = read_records(tmp_path / "results.json")[0]
    assert record.environment == {"push_window_bytes": 3_000_000}
    assert isinstance(record.uneven, dict)
    assert record.uneven["slowdown"] == 0.5


def test_the_staleness_that_is_typed() -> None:
    assert [parse_staleness("staleness", text) for text in ("0", " 4", "async")] == [0, 4, "async"]
    for text in ("-1", "1.5", "", "none"):
        with pytest.raises(ConfigError) as raised:
            parse_staleness("staleness", text)
        assert f"staleness is {text!r}; it must be a number of steps from 0" in str(raised.value)
