"""What `lab run` says of a system's bytes, beside those that a simulated link carries."""

from __future__ import annotations

import re
import statistics

import msgspec
import pytest

from foreprop.cli.measured import compression_lines
from foreprop.simulate.run import simulate_system
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload import limit
from foreprop.workload.hosts import Hosts
from foreprop.workload.profile import Profile, ProfiledArray
from tests.unit.lab_example import example_record

STEPS = 10


def three_arrays() -> Profile:
    arrays = [
        ProfiledArray(name=str(elems), shape=(elems,), forward_flops=elems)
        for elems in (300_000, 500_000, 200_000)
    ]
    return Profile(name="three", arrays=tuple(arrays))


@pytest.mark.parametrize("workers_per_node", [1, 2])
@pytest.mark.parametrize(("system", "counted"), [("p3", 2), ("ring", 1)])
def test_what_follows_from_counted_frames_is_what_a_link_carries(
    system: str, counted: int, workers_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers' workers count pushes and answers; a ring's ranks each chunk once."""
    monkeypatch.setenv("FOREPROP_LOCAL_AGGREGATION", "off")
    setting = SimulatedSetting(
        profile=three_arrays(),
        systems=(system,),
        nodes=4,
        workers_per_node=workers_per_node,
        scale=1,
        compute_s=0.2,
        rate_bits_per_s=1e9,
    )
    simulated = simulate_system(system, setting, Hosts(), steps=STEPS)
    carried = statistics.fmean(simulated.sent_bytes) / STEPS
    record = example_record(
        setting,
        "p3",
        workers_per_node=workers_per_node,
        coded="all of the bytes in none",
        sent_bytes=round(carried),
        counted_bytes=counted * limit.model_bytes(setting.layers),
        counted_frames=counted * 24,
    )
    (*_, line) = compression_lines([msgspec.structs.replace(record, system=system)])
    found = re.search(r"had ([\d.]+) MB a step; ([\d.]+) MB follow", line)
    assert found is not None
    assert float(found[2]) == pytest.approx(float(found[1]), rel=0.06)
