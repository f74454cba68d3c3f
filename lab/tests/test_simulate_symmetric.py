"""One worker that stands for many, beside the simulation of every node."""

from __future__ import annotations

import random
import runpy
import statistics
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreprop.errors import ConfigError
from foreprop.plan.profile import Profile, ProfiledArray
from foreprop.tools.cli.app import app
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.records import read_records
from foreprop_lab.simulate import collective
from foreprop_lab.simulate.cluster import Cluster
from foreprop_lab.simulate.run import simulate_lab, simulate_system
from foreprop_lab.simulate.setting import Crowd, SimulatedSetting, plan_crowds
from tests.tiers import long_cases

BENCHMARKS = Path(__file__).parents[2] / "lab" / "src" / "foreprop_lab" / "benchmarks"

COMPUTE_S = 0.2
SMALL = Profile(
    name="small",
    arrays=tuple(
        ProfiledArray(name=f"{i}.weight", shape=(elems,), forward_flops=elems)
        for i, elems in enumerate((3_000, 40_000, 200_000, 90_000, 150_000))
    ),
)


def setting(system: str, nodes: int, **changes: object) -> SimulatedSetting:
    fields: dict[str, object] = {
        "profile": SMALL,
        "systems": (system,),
        "nodes": nodes,
        "scale": 1,
        "slice_elems": 5_000,
        "compute_s": COMPUTE_S,
        "symmetric": True,
        "iterations": 2,
        "warm_up": 1,
    }
    return SimulatedSetting(**(fields | changes))  # type: ignore[arg-type]


def step_s(system: str, nodes: int, hosts: Hosts | None = None, **changes: object) -> float:
    (record,) = simulate_lab(setting(system, nodes, **changes), hosts=hosts)
    return record.iteration_s.median


@pytest.mark.parametrize("system", ["ring", "ddp", "ddp-tuned"])
@pytest.mark.parametrize("nodes", [2, 5, *long_cases(3, 4, 8, 16)])
@pytest.mark.parametrize("balance", [0.5, 2.0])
def test_a_collective_is_the_same_to_the_last_bit(system: str, nodes: int, balance: float) -> None:
    asked = setting(system, nodes, balance=balance, symmetric=False)
    every = simulate_lab(asked)[0]
    one = simulate_lab(setting(system, nodes, balance=balance))[0]
    assert one.iteration_s == every.iteration_s
    assert one.bucket_bytes == every.bucket_bytes
    assert (one.representatives, every.representatives) == (1, None)


@pytest.mark.parametrize("system", ["p3", "slicing"])
@pytest.mark.parametrize("nodes", [2, 4, *long_cases(8, 16)])
@pytest.mark.parametrize("balance", [0.5, 1.0, 2.0])
def test_served_steps_are_about_as_long(system: str, nodes: int, balance: float) -> None:
    every = step_s(system, nodes, balance=balance, symmetric=False)
    assert step_s(system, nodes, balance=balance) == pytest.approx(every, rel=0.08)


@pytest.mark.parametrize("system", ["p3", "slicing", "kvstore", "wfbp", "tensorflow"])
def test_crowds_of_one_are_the_nodes_themselves(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections between crowds and servers, with nobody who stands for others."""
    asked = setting(system, 5, balance=1.0, jitter=0.2, symmetric=False)
    every = simulate_system(system, asked, Hosts(), steps=3)
    monkeypatch.setattr(Cluster, "is_symmetric", True)
    assert simulate_system(system, asked, Hosts(), steps=3) == every


@pytest.mark.parametrize("representatives", [1, 3])
def test_nodes_send_what_they_send(representatives: int) -> None:
    asked = {"balance": 1.0}
    every = simulate_system("p3", setting("p3", 6, symmetric=False, **asked), Hosts(), steps=3)
    made = setting("p3", 6, representatives=representatives, **asked)
    crowds = simulate_system("p3", made, Hosts(), steps=3)
    assert len(crowds.sent_bytes) == representatives
    mean = statistics.fmean(every.sent_bytes)
    assert statistics.fmean(crowds.sent_bytes) == pytest.approx(mean, rel=0.02)


def test_crowds_cover_every_node_once() -> None:
    for nodes, groups, slow in ((7, 3, 0), (7, 3, 2), (4096, 1, 1), (5, None, 2)):
        crowds = plan_crowds(nodes, groups=groups, slow_nodes=slow, slowdown=0.5)
        assert [node for crowd in crowds for node in crowd.nodes] == list(range(nodes))
        assert {node for crowd in crowds if crowd.slowdown for node in crowd.nodes} == set(
            range(nodes - slow, nodes)
        )
    assert plan_crowds(8, groups=1) == [Crowd(first=0, members=8)]


@pytest.mark.parametrize("system", ["p3", "ring", "ddp"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_all_wait_for_the_slow_one(system: str, symmetric: bool) -> None:
    slow = {"slow_nodes": 1, "slowdown": 0.5, "balance": 0.001, "symmetric": symmetric}
    assert step_s(system, 6, **slow) == pytest.approx(1.5 * COMPUTE_S, rel=0.05)


def expected_slowest(nodes: int, jitter: float) -> float:
    """Of so many nodes' draws: all wait when one's backward pass ends, which comes after its
    forward pass of the step before, a third of the compute, with another draw."""
    draw = partial(random.Random(1).lognormvariate, 0, jitter)
    return statistics.fmean(
        max(draw() / 3 + draw() * 2 / 3 for _ in range(nodes)) for _ in range(2000)
    )


@pytest.mark.parametrize("system", ["p3", "ddp"])
@pytest.mark.parametrize("changes", [{}, {"representatives": 4}, *long_cases({"symmetric": False})])
def test_a_step_has_the_slowest_of_all_draws(system: str, changes: dict[str, object]) -> None:
    """Where the network does not count."""
    asked = setting(system, 32, balance=0.001, step_jitter=0.3, slice_elems=200_000, **changes)
    simulated = simulate_system(
        system, asked, Hosts(), steps=61, bucket_bytes=10**7 if system == "ddp" else None
    )
    mean_s = statistics.fmean(simulated.step_s[0][1:])
    assert mean_s == pytest.approx(COMPUTE_S * expected_slowest(32, 0.3), rel=0.06)


@pytest.mark.parametrize("system", ["ring", "ddp", *long_cases("p3")])
def test_layers_jitter_hardly_adds_up(system: str) -> None:
    """Five layers' draws: not the slowest member of each layer, but the slowest over all."""
    asked = {"jitter": 0.3, "balance": 0.3, "iterations": 20}
    every = step_s(system, 12, symmetric=False, **asked)
    assert step_s(system, 12, **asked) == pytest.approx(every, rel=0.05)


def test_more_nodes_than_slices_leave_servers_idle_and_steps_long() -> None:
    """Incast: each busy server gets a slice from everyone; finer slices share that out."""
    fine, coarse = (
        step_s("p3", 512, rate_bits_per_s=1e9, slice_elems=elems) for elems in (1_000, 100_000)
    )
    every_copy_s = 512 * 100_000 * 4 * 8 / 1e9  # of the largest slice, over its server's port
    assert coarse > every_copy_s
    assert fine < 0.2 * coarse


@pytest.mark.parametrize("system", ["p3", "kvstore", "ring", "ddp"])
def test_thousands_of_nodes_are_simulated_unasked_by_symmetry(system: str) -> None:
    (record,) = simulate_lab(
        setting(system, 4096, symmetric=None, rate_bits_per_s=10e9, iterations=1)
    )
    assert (record.representatives, record.network) == (1, "simulated")
    assert record.iteration_s.median > record.limit_s
    assert setting(system, 65, symmetric=None).is_symmetric
    assert not setting(system, 64, symmetric=None).is_symmetric


@pytest.mark.parametrize("most", [8, 25])
def test_passes_that_are_simulated_as_one_take_as_long(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for system in ("ring", "ddp"):
        for rate in (20e6, 1e9):
            each = step_s(system, 33, rate_bits_per_s=rate)
            with monkeypatch.context() as patched:
                patched.setattr(collective, "_MOST_MESSAGES", most)
                assert step_s(system, 33, rate_bits_per_s=rate) == pytest.approx(each, rel=0.03)


def test_a_servers_processor_sees_one_frame_after_the_other() -> None:
    """Two frames of each slice and worker, at 1 ms, on the server with the most slices."""
    asked = {"rate_bits_per_s": 1e9, "slice_elems": 30_000}
    busy = Hosts(server_frame_s=1e-3)
    most_slices = 5  # 18 slices of at most 30,000 on four servers
    for symmetric in (True, False):
        free_s = step_s("p3", 4, symmetric=symmetric, **asked)
        busy_s = step_s("p3", 4, busy, symmetric=symmetric, **asked)
        assert free_s < busy_s < free_s + most_slices * 2 * 4 * 1e-3
        many_s = step_s("p3", 64, Hosts(server_frame_s=1e-2), symmetric=True, **asked)
        assert many_s > 64 * 1e-2


@pytest.mark.parametrize("system", ["p3", "slicing", "ring"])
@pytest.mark.parametrize(
    ("name", "value"), [("FOREPROP_WIRE_DTYPE", "bfloat16"), ("FOREPROP_CLIP_GRAD_NORM", "1.0")]
)
def test_half_precision_and_the_norm_are_as_close(
    system: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, each_asked = (setting(system, 8, symmetric=how) for how in (True, False))
    free = simulate_system(system, asked, Hosts(), steps=4)
    monkeypatch.setenv(name, value)
    every = simulate_system(system, each_asked, Hosts(), steps=4)
    one = simulate_system(system, asked, Hosts(), steps=4)
    free_s, every_s, one_s = (statistics.fmean(each.step_s[0][1:]) for each in (free, every, one))
    assert one_s == pytest.approx(every_s, rel=1e-9 if system == "ring" else 0.08)
    assert statistics.fmean(one.sent_bytes) == pytest.approx(
        statistics.fmean(every.sent_bytes), rel=0.02
    )
    assert one_s != pytest.approx(free_s, rel=1e-4)
    if name == "FOREPROP_WIRE_DTYPE":
        assert one_s < 0.8 * free_s


def test_about_the_norm_servers_talk_to_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the barrier takes a server's processor two frames more, however many the members are."""
    busy = Hosts(server_frame_s=1e-3)
    asked = {"rate_bits_per_s": 10e9, "slice_elems": 200_000, "compute_s": 0.001}
    free_s = step_s("p3", 64, busy, **asked)
    monkeypatch.setenv("FOREPROP_CLIP_GRAD_NORM", "1.0")
    assert free_s < step_s("p3", 64, busy, **asked) < free_s + 0.25 * 64 * 1e-3


@pytest.mark.parametrize("system", ["p3", "ddp", *long_cases("ring")])
def test_several_workers_per_node_are_simulated_node_by_node(system: str) -> None:
    several = setting(
        system, 65, workers_per_node=2, symmetric=None, slice_elems=100_000, balance=0.1
    )
    assert not several.is_symmetric
    bucket_bytes = 10**7 if system == "ddp" else None
    simulated = simulate_system(system, several, Hosts(), steps=1, bucket_bytes=bucket_bytes)
    assert (len(simulated.step_s), len(simulated.sent_bytes)) == (130, 65)


def test_several_workers_per_node_stand_for_nobody() -> None:
    with pytest.raises(ConfigError, match=r"symmetric is True, but workers_per_node is 2: .* out"):
        setting("p3", 4, workers_per_node=2)
    with pytest.raises(ConfigError, match=r"workers_per_node is 8 on 129 nodes; at most 1024 work"):
        setting("p3", 129, workers_per_node=8, symmetric=None)
    with pytest.raises(ConfigError, match="representatives is 2, but several workers per node"):
        setting("p3", 4, workers_per_node=2, symmetric=None, representatives=2)


def test_a_node_s_relays_share_a_processor() -> None:
    """Each of its three workers' pushes of every slice passes it, and so do the replies."""
    asked = {"rate_bits_per_s": 1e9, "symmetric": False, "workers_per_node": 3}
    free_s = step_s("p3", 4, **asked)
    busy_s = step_s("p3", 4, Hosts(server_frame_s=1e-3), **asked)
    slices = 98  # of at most 5,000 elements
    assert busy_s > max(free_s, slices * 2 * 3 * 1e-3)


@pytest.mark.parametrize("system", ["p3", "ring"])
def test_slow_nodes_slow_all_their_workers(system: str) -> None:
    slow = {"slow_nodes": 1, "slowdown": 0.5, "balance": 0.001, "symmetric": False}
    simulated = simulate_system(
        system, setting(system, 3, workers_per_node=2, **slow), Hosts(), steps=3
    )
    waited_s = [statistics.fmean(each[1:]) for each in simulated.waited_s]
    assert min(waited_s[:4]) > 0.3 * COMPUTE_S
    assert max(waited_s[4:]) < 0.1 * COMPUTE_S


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="slow_nodes is 4; it must be at least 0 and below nodes"):
        setting("p3", 4, slow_nodes=4)
    with pytest.raises(ConfigError, match=r"representatives is 4; .* at most 3"):
        setting("p3", 4, slow_nodes=1, representatives=4)
    with pytest.raises(ConfigError, match="representatives is 2, but every one of 4 nodes"):
        setting("p3", 4, symmetric=None, representatives=2)
    with pytest.raises(ConfigError, match=r"step_jitter is -0\.1"):
        setting("p3", 4, step_jitter=-0.1)
    with pytest.raises(ConfigError, match="nodes is 100000; at most 65536"):
        setting("p3", 100_000)


def test_the_command_says_that_symmetry_was_used(tmp_path: Path) -> None:
    options = (
        "--model resnet50 --systems p3,ddp --steps 1 --nodes 16 --rate 1Gbit"
        " --latency 50us --slow-nodes 1 --slowdown 0.5 --step-jitter 0.1 --compute 2s --symmetric"
    )
    arguments = ["lab", "simulate", *options.split(), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "simulated by symmetry" in " ".join(result.output.split())
    records = read_records(tmp_path / "results.json")
    assert [record.representatives for record in records] == [2, 2]
    assert all(record.iteration_s.median > 1.2 * 2 for record in records)


@pytest.mark.long
@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
def test_the_study_of_scale_is_drawn_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """lab/src/foreprop_lab/benchmarks/scale.py, of two points."""
    script = runpy.run_path(str(BENCHMARKS / "scale.py"))
    asked = [
        {"experiment": "rates", "model": "resnet50", "system": system, "nodes": 256,
         "rate_bits_per_s": 10e9}
        for system in ("ddp", "ddp-tuned")
    ]  # fmt: skip
    name = str(tmp_path / "scale")
    done = script["main"](name, points=asked)
    assert [point["system"] for point in done] == ["ddp", "ddp-tuned"]
    assert done[1]["limit_s"] < done[1]["step_s"] <= done[0]["step_s"]
    assert script["main"](name, points=asked) == done
    assert len(list(tmp_path.glob("scale-*.png"))) == 4
