"""Backup workers in the simulator: a step takes as long as the last worker that counts."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from foreprop.errors import ConfigError
from foreprop.plan.profile import Profile, ProfiledArray
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.simulate.run import counted_step_s, simulate_lab, simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

SMALL = Profile(
    name="small",
    arrays=tuple(
        ProfiledArray(name=f"{i}.weight", shape=(elems,), forward_flops=elems)
        for i, elems in enumerate((3_000, 20_000, 40_000, 9_000))
    ),
)
COMPUTE_S = 0.2


def setting(**changes: Any) -> SimulatedSetting:
    fields: dict[str, Any] = {
        "profile": SMALL,
        "systems": ("p3",),
        "nodes": 4,
        "scale": 1,
        "slice_elems": 5_000,
        "compute_s": COMPUTE_S,
        "iterations": 8,
        "rate_bits_per_s": 100e9,  # hardly anything is waited for but other workers
        "latency_s": 1e-6,
    }
    return SimulatedSetting(**(fields | changes))


@pytest.mark.parametrize(
    ("slow_nodes", "backups", "slow"), [(1, 0, True), (1, 1, False), (2, 1, True), (2, 2, False)]
)
def test_no_worker_waits_for_the_slowest(slow_nodes: int, backups: int, slow: bool) -> None:
    """Twice as slow as the others in each step."""
    asked = setting(slow_nodes=slow_nodes, slowdown=1.0)
    simulated = simulate_system("p3", asked, Hosts(), steps=8, backup_workers=backups)
    step_s = counted_step_s(simulated)
    assert statistics.fmean(step_s) == pytest.approx((1 + slow) * COMPUTE_S, rel=0.02)
    assert all(len(each) == 8 for each in simulated.step_s), "the slow ones make their steps, too"
    assert sum(simulated.step_s[-1]) > 1.9 * 8 * COMPUTE_S


def test_a_record_has_the_step_of_those_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = setting(slow_nodes=1, slowdown=1.0)
    (without,) = simulate_lab(asked)
    monkeypatch.setenv("FOREPROP_BACKUP_WORKERS", "1")
    (record,) = simulate_lab(asked)
    assert without.iteration_s.median == pytest.approx(2 * COMPUTE_S, rel=0.02)
    assert record.iteration_s.median == pytest.approx(COMPUTE_S, rel=0.02)


def test_the_norm_of_what_counts_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any worker adds it up, so the slow one is not waited for there, either."""
    monkeypatch.setenv("FOREPROP_BACKUP_WORKERS", "1")
    monkeypatch.setenv("FOREPROP_CLIP_GRAD_NORM", "1")
    (record,) = simulate_lab(setting(slow_nodes=1, slowdown=1.0))
    assert record.iteration_s.median == pytest.approx(COMPUTE_S, rel=0.05)


def test_of_steps_that_differ_the_third_of_four_counts() -> None:
    """Late workers fall behind now and then, so it is not quite the order statistic."""
    asked = setting(step_jitter=0.4, iterations=40)
    step_s = []
    for backups in (0, 1, 2):
        simulated = simulate_system("p3", asked, Hosts(), steps=40, backup_workers=backups)
        step_s.append(statistics.fmean(counted_step_s(simulated)[2:]))
    assert step_s == sorted(step_s, reverse=True)
    assert step_s[1] < 0.95 * step_s[0]


@pytest.mark.parametrize(
    ("changes", "backups", "told"),
    [
        ({}, 4, "backup_workers is 4, and must be below the number of workers, 4"),
        (
            {"nodes": 128},
            2,
            "backup_workers is 2, but a node stands for several: ask for symmetric=False",
        ),
    ],
)
def test_what_is_not_simulated(changes: dict[str, Any], backups: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        simulate_system("p3", setting(**changes), Hosts(), steps=2, backup_workers=backups)


def test_rows_wait_for_every_worker() -> None:
    arrays = tuple(
        ProfiledArray(name=array.name, shape=(100, 30), forward_flops=1, alpha=0.1)
        for array in SMALL.arrays
    )
    asked = setting(profile=Profile(name="rows", arrays=arrays), rows=True)
    with pytest.raises(ConfigError, match="backup_workers is 1 with p3, and rows is True"):
        simulate_system("p3", asked, Hosts(), steps=2, backup_workers=1)
