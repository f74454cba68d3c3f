"""What `lab run` says of a system's bytes, beside those that a simulated link carries."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from foreprop.plan import limit
from foreprop.plan.profile import Profile, ProfiledArray
from foreprop.tools.cli.app import app
from foreprop.tools.compare.result import Spread
from foreprop_lab.commands.measured import (
    compression_lines,
    launch_lines,
    over_ddp_lines,
    table,
)
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import LabSetting
from foreprop_lab.setting.records import Record
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting
from lab.tests.lab_example import example_record

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


# Over DDP.
def records(**steps_s: float) -> list[Record]:
    setting = LabSetting(
        profile=three_arrays(), systems=("p3",), nodes=2, compute_s=0.2, rate_bits_per_s=1e9
    )
    return [record_of(setting, name.replace("_", "-"), step_s) for name, step_s in steps_s.items()]


def record_of(setting: LabSetting, system: str, step_s: float, **changes: Any) -> Record:
    taken = Spread(median=step_s, p10=step_s, p90=step_s)
    made = example_record(setting, "p3", iteration_s=taken, **changes)
    return msgspec.structs.replace(made, system=system)


def column(name: str, shown: list[Record]) -> list[str] | None:
    setting = LabSetting(
        profile=three_arrays(), systems=("p3",), nodes=2, compute_s=0.2, rate_bits_per_s=1e9
    )
    columns = {str(each.header): [*each.cells] for each in table(setting, shown).columns}
    return columns.get(name)  # type: ignore[return-value]


def test_each_system_is_shown_over_ddp_and_the_last_line_says_the_fastest() -> None:
    shown = records(p3=0.25, slicing=0.4, ddp=0.3, ddp_tuned=0.28, mxnet_p3=0.1)
    assert column("over ddp", shown) == ["1.20x", "0.75x", "1.00x", "1.07x", "3.00x"]
    assert [*over_ddp_lines(shown)] == [
        "p3 is 1.20x as fast as ddp: 250 ms per step instead of 300 ms."
    ]
    (slower,) = over_ddp_lines(records(ring=0.4, ddp=0.3))
    assert slower == "ring is 0.75x as fast as ddp: 400 ms per step instead of 300 ms."


@pytest.mark.parametrize("systems", [{"p3": 0.2, "ddp_tuned": 0.3}, {"p3": 0.2}])
def test_without_plain_ddp_nothing_is_over_it(systems: dict[str, float]) -> None:
    shown = records(**systems)
    assert column("over ddp", shown) is None
    assert [*over_ddp_lines(shown)] == []
    assert [*over_ddp_lines(records(ddp=0.3, ddp_tuned=0.2))] == []


def test_what_is_cpu_bound_is_no_speed_up() -> None:
    p3, ddp = records(p3=0.2, ddp=0.3)
    busy = msgspec.structs.replace(ddp, cpu_bound=True)
    (line,) = over_ddp_lines([p3, busy])
    assert line.endswith("with ddp: CPU-bound (ddp), so no speed-up.")


# Launching.
def test_the_table_and_a_line_for_each_system_say_what_a_launch_cost() -> None:
    p3, ddp = records(p3=0.2, ddp=0.3)
    shown = [
        msgspec.structs.replace(record, launch_s=8e-6, launching_s=0.04, held_s=held_s)
        for record, held_s in ((p3, 0.03), (ddp, 0.0))
    ]
    setting = LabSetting(profile=three_arrays(), systems=("p3", "ddp"), launch_s=8e-6)
    assert str(table(setting, shown).title).endswith(", launches of 8 us")
    included = "the wait for the interpreter's lock included"
    assert [*launch_lines(shown)] == [
        f"p3: launches of 8 us took 1.75 times their 40 ms a step, {included}",
        f"ddp: launches of 8 us took 1.00 times their 40 ms a step, {included}",
    ]
    assert [*launch_lines([p3, ddp])] == []
    assert "launches" not in str(table(setting, [p3, ddp]).title)


@pytest.mark.parametrize("text", ["8", "fast", "-8us", "8 launches"])
def test_a_launch_that_is_no_duration_is_refused(text: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lab", "run", f"--launch={text}", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"--launch is {text!r}; it must be a number with its unit" in result.stderr
