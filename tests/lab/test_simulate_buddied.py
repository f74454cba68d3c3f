"""What snapshots cost in the simulator: about their bytes, and with K = 1 the wait as well."""

from __future__ import annotations

import statistics

import pytest

from foreprop.errors import ConfigError
from foreprop.simulate.run import simulate_system
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload.hosts import Hosts
from foreprop.workload.profile import Profile, ProfiledArray

STEPS = 12


def setting(nodes: int = 4) -> SimulatedSetting:
    arrays = tuple(
        ProfiledArray(name=f"{i}.weight", shape=(elems,), forward_flops=elems)
        for i, elems in enumerate((30_000, 20_000, 40_000, 60_000))
    )
    return SimulatedSetting(
        profile=Profile(name="small", arrays=arrays),
        nodes=nodes,
        systems=("p3",),
        scale=1,
        slice_elems=5_000,
        compute_s=0.2,
        balance=1.0,
        latency_s=1e-5,
    )


def step_s_and_bytes(every: int | None, nodes: int = 4) -> tuple[float, int]:
    buddies = {} if every is None else {"elastic": True, "buddy_steps": every}
    simulated = simulate_system("p3", setting(nodes), Hosts(), steps=STEPS, **buddies)
    return statistics.fmean(simulated.step_s[0][2:]), sum(simulated.sent_bytes)


def test_the_more_seldom_snapshots_are_the_less_they_cost() -> None:
    usual_s, usual_bytes = step_s_and_bytes(None)
    found = [step_s_and_bytes(every) for every in (1, 3, 6)]
    times = [step_s for step_s, _ in found]
    assert times == sorted(times, reverse=True)
    assert usual_s <= times[-1] < 1.1 * usual_s < times[0]
    # momentum has the size of the model: (N - 1) pushes and replies of it go out of N nodes
    for every, (_, sent_bytes) in zip((1, 3, 6), found, strict=True):
        more = (sent_bytes - usual_bytes) / usual_bytes
        assert more == pytest.approx(1 / (2 * 3 * every), rel=0.25)


def test_a_node_that_stands_for_others_has_no_buddy() -> None:
    with pytest.raises(ConfigError, match="buddy_steps is 5, but a node stands for several"):
        step_s_and_bytes(5, nodes=128)
