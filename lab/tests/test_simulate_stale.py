"""Workers apart in the simulator: throughput by staleness, beside closed forms."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
from typer.testing import CliRunner

from foreprop.core.staleness import Staleness
from foreprop.errors import ConfigError
from foreprop.plan.profile import Profile, ProfiledArray
from foreprop.tools.cli.app import app
from foreprop_lab.benchmarks.stale_training import closed_steps
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import STALE_SYSTEMS
from foreprop_lab.simulate.run import simulate_lab, simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

SMALL = Profile(
    name="small",
    arrays=tuple(
        ProfiledArray(name=f"{i}.weight", shape=(elems,), forward_flops=elems)
        for i, elems in enumerate((3_000, 20_000, 40_000, 9_000))
    ),
)
COMPUTE_S = 0.2
FAST = 100e9
"""Links on which hardly anything is waited for but other workers."""


def setting(*systems: str, **changes: Any) -> SimulatedSetting:
    fields: dict[str, Any] = {
        "profile": SMALL,
        "systems": systems or ("p3",),
        "scale": 1,
        "slice_elems": 5_000,
        "compute_s": COMPUTE_S,
        "iterations": 6,
        "warm_up": 1,
        "rate_bits_per_s": FAST,
        "latency_s": 1e-6,
    }
    return SimulatedSetting(**(fields | changes))


def made_until(step_s: list[float], time_s: float) -> int:
    """How many steps a worker has made by then."""
    return sum(end_s <= time_s for end_s in itertools.accumulate(step_s))


@pytest.mark.parametrize("slowdown", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("staleness", [0, 1, 3, "async"])
def test_with_a_slow_worker_as_many_steps_as_the_closed_form_says(
    staleness: Staleness, slowdown: float
) -> None:
    rounds, slow = 8, 1 + slowdown
    asked = setting(slow_nodes=1, slowdown=slowdown, staleness=staleness)
    simulated = simulate_system("p3", asked, Hosts(), steps=int(rounds * slow) + 8)
    # a step is from the end of a forward pass to the end of the next: one more is under way
    made = [made_until(step_s, rounds * slow * COMPUTE_S * 1.02) for step_s in simulated.step_s]
    closed = closed_steps(staleness, workers=4, slow=slow, rounds=rounds)
    assert made[-1] == rounds
    assert sum(made) == pytest.approx(closed, abs=3)  # one for each of the others


def test_without_a_bound_workers_together_are_as_fast_as_each_by_itself() -> None:
    """The harmonic mean of their steps."""
    asked = setting(slow_nodes=1, slowdown=1.0, staleness="async", iterations=12)
    (record,) = simulate_lab(asked)
    expected_s = 4 / (3 / COMPUTE_S + 1 / (2 * COMPUTE_S))
    assert record.iteration_s.median == pytest.approx(expected_s, rel=0.01)
    assert record.staleness == "async"
    (together,) = simulate_lab(setting(slow_nodes=1, slowdown=1.0, iterations=12))
    assert together.iteration_s.median == pytest.approx(2 * COMPUTE_S, rel=0.01)


def test_of_steps_that_differ_a_bound_hides_some_and_none_hides_all() -> None:
    """Nobody is slow for good, so a few steps are nearly as good as no bound."""
    mean_s = []
    for staleness in (0, 1, 4, "async"):
        asked = setting(step_jitter=0.4, staleness=staleness, iterations=40)
        (record,) = simulate_lab(asked)
        mean_s.append(record.typical_s)
    assert mean_s == sorted(mean_s, reverse=True)
    assert mean_s[2] < 1.1 * mean_s[3] < 0.9 * mean_s[0]


@pytest.mark.parametrize("system", STALE_SYSTEMS)
def test_equal_workers_send_as_many_bytes_and_take_no_longer(system: str) -> None:
    """On links that matter."""
    fields: dict[str, Any] = {"rate_bits_per_s": None, "balance": 0.8}
    together, apart = (
        simulate_system(system, setting(system, staleness=s, **fields), Hosts(), steps=6)
        for s in (0, 2)
    )
    for bytes_together, bytes_apart in zip(together.sent_bytes, apart.sent_bytes, strict=True):
        assert bytes_apart == pytest.approx(bytes_together, rel=0.2)  # who is done first goes on
    whole_s = statistics.fmean(together.step_s[0])
    assert statistics.fmean(apart.step_s[0]) < 1.1 * whole_s


def test_it_is_deterministic() -> None:
    asked = setting(step_jitter=0.3, staleness=2)
    assert simulate_lab(asked) == simulate_lab(asked)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"staleness": -1}, "staleness is -1; it must be a number of steps from 0, or 'async'"),
        (
            {"staleness": 2, "systems": ("p3", "ddp")},
            "systems has 'ddp', which makes its steps together; with a staleness (2) there are p3,"
            " slicing, wfbp, p3-2019",
        ),
        ({"staleness": 1, "systems": ("kvstore@9",)}, "systems has 'kvstore@9'"),
        (
            {"staleness": "async", "symmetric": True},
            "staleness is 'async', but a node stands for several of 4, which would make their",
        ),
    ],
)
def test_settings_that_cannot_be_asynchronous_are_refused(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        setting(**changes)
    assert told in str(raised.value)


def test_settings_that_need_all_gradients_of_a_step_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (record,) = simulate_lab(setting(staleness=2, workers_per_node=2))  # each pushes by itself
    assert record.staleness == 2
    monkeypatch.setenv("FOREPROP_LOCAL_AGGREGATION", "on")
    with pytest.raises(ConfigError) as raised:
        simulate_lab(setting(staleness=2, workers_per_node=2))
    assert "and local_aggregation is 'on': each rank's push is an update" in str(raised.value)
    monkeypatch.delenv("FOREPROP_LOCAL_AGGREGATION")
    monkeypatch.setenv("FOREPROP_CLIP_GRAD_NORM", "1.0")
    with pytest.raises(ConfigError) as raised:
        simulate_lab(setting(staleness=2))
    assert "clip_grad_norm is 1.0: each rank's push is an update by itself" in str(raised.value)


def test_the_command(tmp_path: Any) -> None:
    options = "--systems p3 --nodes 3 --steps 2 --compute 200ms --rate 1Gbit --model resnet50"
    out = ["--out", str(tmp_path)]
    shown = CliRunner().invoke(
        app, ["lab", "simulate", *options.split(), "--staleness", "async", *out]
    )
    assert shown.exit_code == 0, shown.output
    assert "staleness async" in " ".join(shown.output.split())
    wrong = CliRunner().invoke(
        app, ["lab", "simulate", *options.split(), "--staleness", "some", *out]
    )
    assert wrong.exit_code == 2
    assert "--staleness is 'some'; it must be a number of steps from 0" in wrong.output
