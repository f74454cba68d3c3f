"""`foreprop lab figures`: what is measured, that a restart resumes, and the files it leaves."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from foreprop.errors import ConfigError, TransportError
from foreprop.tools.compare.result import Spread
from foreprop_lab.experiments.chart import Chart, write_chart
from foreprop_lab.experiments.figures import distribution
from foreprop_lab.experiments.figures.campaign import Figures, Pace, duration, make_figures
from foreprop_lab.experiments.figures.comparison import maybe_best, points_of
from foreprop_lab.experiments.figures.curves import bandwidth_panels, utilisation_panels
from foreprop_lab.experiments.figures.distribution import distributions
from foreprop_lab.experiments.figures.keptruns import (
    KeptRun,
    maybe_read_run,
    timelines_from,
    typical_pair,
    write_run,
)
from foreprop_lab.experiments.figures.sweeps import (
    FULL,
    QUICK,
    Effort,
    Measurement,
    plan_measurements,
)
from foreprop_lab.setting.labsetting import LabSetting
from foreprop_lab.setting.records import Record, read_records
from lab.tests.lab_example import ExampleLab, example_record

CORES = 2


def plan(effort: Effort, **changes: Any) -> list[Measurement]:
    return plan_measurements(effort, traces=Path("traces"), **changes)


def figures(out: Path, measure: ExampleLab, **changes: Any) -> tuple[Figures, str]:
    said = io.StringIO()
    values: dict[str, Any] = {"quick": True, "console": Console(file=said), "measure": measure}
    made = make_figures(out, **(values | changes))
    return made, said.getvalue()


@pytest.fixture(scope="module", autouse=True)
def _fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib keeps the fonts that it has used open: let it do so before a test is watched."""

    def draw(figure: Figure) -> None:
        figure.suptitle("bold", weight="bold")
        figure.supxlabel("normal")

    folder = tmp_path_factory.mktemp("fonts")
    write_chart(folder, "fonts", Chart(whole=draw, whole_in=(1.0, 1.0), parts=[]), b"{}")


@pytest.fixture
def bandwidth() -> list[LabSetting]:
    return [m.setting for m in plan(FULL, only=[1])]


def test_the_plan_has_what_the_issue_asks_for(bandwidth: list[LabSetting]) -> None:
    models = {"resnet50", "inceptionv3", "vgg19", "sockeye"}
    by_balance: dict[float, list[LabSetting]] = {}
    for setting in bandwidth:
        by_balance.setdefault(setting.balance or 0.0, []).append(setting)
        assert {"kvstore", "slicing", "p3", "ddp"} <= set(setting.systems)
    assert len(by_balance) >= 5
    assert all({s.profile.name for s in found} == models for found in by_balance.values())
    for balance in (0.5, 1.0, 2.0):
        assert all(s.iterations >= 20 for s in by_balance[balance])
        assert all("ddp-tuned" in s.systems for s in by_balance[balance])
    nodes = [m.setting for m in plan(FULL, only=[3])]
    assert {s.profile.name for s in nodes} == {"resnet50", "sockeye", "vgg19"}
    for model, counts in (("resnet50", [2, 4, 8, 16]), ("vgg19", [2, 4, 8])):
        of_model = [s for s in nodes if s.profile.name == model]
        assert [s.nodes for s in of_model] == counts
        assert len({round(s.rate) for s in of_model}) == 1
    sizes = {m.setting.slice_elems for m in plan(FULL, only=[4])}
    assert (min(sizes), max(sizes)) == (1_000, 10_000_000)
    (two_steps,) = plan(FULL, only=[5])
    assert two_steps.figures == (2, 5)
    assert two_steps.setting.trace is not None
    assert two_steps.setting.sample_network
    watched = {s.profile.name: s.systems for s in (m.setting for m in plan(FULL, only=[2]))}
    assert all({"kvstore", "p3"} <= {*watched[name]} for name in ("vgg19", "resnet50", "sockeye"))
    assert "tensorflow" in watched["resnet50"]
    assert watched["inceptionv3"] == ("wfbp",)


@pytest.mark.parametrize(("effort", "longest_min"), [(QUICK, 17), (FULL, 210)])
def test_the_plan_fits_the_time_there_is(effort: Effort, longest_min: float) -> None:
    assert sum(m.expected_s(cores=CORES) for m in plan(effort)) < longest_min * 60


def test_keys_tell_apart_what_is_measured_differently() -> None:
    everything = [*plan(FULL), *plan(QUICK)]
    assert len({m.key for m in everything}) == len(everything)
    (one, *_) = everything
    moved = replace(one, setting=replace(one.setting, mxnet_python=Path("elsewhere")))
    assert moved.key == one.key
    longer = plan(FULL, iterations=21)[0]
    assert longer.key != one.key
    assert longer.setting.iterations == 21


def test_mxnet_is_measured_where_there_is_one() -> None:
    found = {
        m.setting.profile.name
        for m in plan(FULL, mxnet_python=Path("python"))
        if "mxnet-p3" in m.setting.systems
    }
    assert found == {"vgg19", "resnet50"}


@pytest.mark.parametrize("only", [[], [0], [1, 6]])
def test_figures_that_there_are_not_are_refused(only: list[int]) -> None:
    with pytest.raises(ConfigError, match="figures 1 to 5"):
        plan(FULL, only=only)


def test_a_restart_measures_only_what_is_missing(tmp_path: Path) -> None:
    first = ExampleLab(fail_at=3, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        figures(tmp_path, first, only=[3])
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2
    second = ExampleLab()
    made, said = figures(tmp_path, second, only=[3])
    assert second.asked == [m.setting for m in plan(QUICK, only=[3])][2:]
    assert "2 of them made before" in said
    assert "1/1 " in said
    assert read_records(tmp_path / "results.json") == made.records
    third = ExampleLab()
    figures(tmp_path, third, only=[3])
    assert third.asked == []


def test_a_run_that_cannot_be_read_is_as_good_as_none(tmp_path: Path) -> None:
    run = KeptRun(title="a run", taken_at="today", took_s=1.0, machine={}, records=[])
    path = tmp_path / "run.json"
    assert maybe_read_run(path) is None
    write_run(path, run)
    assert maybe_read_run(path) == run
    path.write_bytes(path.read_bytes()[:-10])
    assert maybe_read_run(path) is None


def test_a_failure_is_reported_and_does_not_end_the_rest(tmp_path: Path) -> None:
    lab = ExampleLab(fail_at=2, error=TransportError("node 3 is gone"))
    made, said = figures(tmp_path, lab, only=[3])
    assert len(lab.asked) == 3
    assert [failure.rpartition(": ")[2] for failure in made.failed] == ["node 3 is gone"]
    assert "FAILED, node 3 is gone" in said
    assert "Not measured: resnet50, 4 nodes" in made.page.read_text()


def test_old_traces_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    old = tmp_path / "traces" / "p3" / "worker-0.1.trace.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    made, _ = figures(tmp_path, ExampleLab(), only=[5])
    assert not old.exists()
    assert made.failed == []


def test_the_time_left_follows_how_the_past_turned_out() -> None:
    pace = Pace([10.0, 20.0, 30.0])
    assert pace.left_s() == 60.0
    assert pace.left_s(running_s=4.0) == 56.0
    pace.finish(15.0)
    assert pace.left_s() == 75.0
    assert pace.left_s(running_s=1000.0) == 45.0
    assert [duration(s) for s in (40, 720, 5700)] == ["40 s", "12 min", "1 h 35 min"]


def _rate(run: tuple[LabSetting, list[Record]]) -> float:
    return run[0].rate


def test_curves_are_workers_over_seconds(bandwidth: list[LabSetting]) -> None:
    runs = [(s, [example_record(s, name) for name in s.systems]) for s in bandwidth]
    panels = bandwidth_panels(runs)
    assert [panel.title for panel in panels] == ["ResNet-50", "InceptionV3", "VGG-19", "Sockeye"]
    p3 = panels[0].curves[0]
    assert p3.system == "p3"
    assert [p.x for p in p3.points] == sorted(p.x for p in p3.points)
    slowest = min((run for run in runs if run[0].profile.name == "resnet50"), key=_rate)
    record = next(r for r in slowest[1] if r.system == "p3")
    assert p3.points[0].throughput == pytest.approx(4 / record.iteration_s.median)
    assert p3.points[0].low == pytest.approx(4 / record.iteration_s.p90)
    for panel in panels:
        highest = max(y for _, y in panel.limit)
        assert all(p.throughput <= highest for curve in panel.curves for p in curve.points)


def test_deciles_of_few_steps_leave_the_median_inside(bandwidth: list[LabSetting]) -> None:
    odd = Spread(median=1.0, p10=-0.1, p90=0.9)
    record = example_record(bandwidth[0], "p3", iteration_s=odd)
    (panel,) = bandwidth_panels([(bandwidth[0], [record])])
    (point,) = panel.curves[0].points
    assert point.low <= point.throughput <= point.high < math.inf


def test_cpu_bound_runs_are_in_no_speed_up(bandwidth: list[LabSetting]) -> None:
    runs = [
        [example_record(s, name, cpu_bound=s.balance == 1.0) for name in s.systems]
        for s in bandwidth
    ]
    points = points_of(runs)
    bound = next(p for p in points if round(p.balance, 3) == 1.0)
    assert bound.maybe_speed_up("kvstore") is None
    best = maybe_best(points, "vgg19", "kvstore")
    assert best is not None
    assert round(best.balance, 2) != 1.0
    assert maybe_best(points, "vgg19", "mxnet-p3") is None


def test_utilisation_is_the_share_of_the_rate_that_the_counters_show() -> None:
    setting = plan(QUICK, only=[2])[0].setting
    record = example_record(setting, "p3")
    bytes_per_s = setting.rate / 8
    samples = [
        (i / 100, int(bytes_per_s * i / 100), int(bytes_per_s * i / 200)) for i in range(900)
    ]
    samples.insert(500, (4.9901, samples[499][1], samples[499][2]))  # two readings at once
    (panel,) = utilisation_panels([record], {"p3": samples})
    assert panel.sent_share == pytest.approx([1.0] * len(panel.sent_share), abs=1e-3)
    assert panel.received_share == pytest.approx([0.5] * len(panel.sent_share), abs=1e-3)
    assert panel.seconds[-1] == pytest.approx(2.2 * record.iteration_s.median, abs=0.02)
    assert utilisation_panels([record], {}) == []


def test_a_typical_pair_of_steps_has_no_pause_in_it() -> None:
    starts = [0, 10, 20, 500, 510, 520, 530, 540]  # step 3 ends with a pause between blocks
    events = [
        {"ph": "X", "cat": "forward", "name": "0", "ts": ts, "dur": 1, "args": {"step": step}}
        for step, ts in enumerate(starts, 1)
    ]
    first = typical_pair({"traceEvents": events})
    assert first in (1, 4, 5, 6)
    with pytest.raises(ConfigError, match="three in a row"):
        typical_pair({"traceEvents": events[:2]})


def test_timelines_have_the_profiles_names(tmp_path: Path) -> None:
    setting = replace(plan(QUICK, only=[5])[0].setting, trace=tmp_path)
    with pytest.raises(ConfigError, match="traces of worker 0"):
        timelines_from(setting)
    ExampleLab()(setting, progress=lambda _: None)
    found = timelines_from(setting)
    assert list(found) == ["kvstore", "ddp", "p3"]
    names = {event.layer for event in found["p3"] if event.lane == "compute"}
    assert names == {layer.name for layer in setting.layers}
    pushed = {event.layer.rpartition(".")[0] for event in found["p3"] if event.lane == "push"}
    assert pushed == names


@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
def test_parameters_are_distributed_as_the_paper_has_it(tmp_path: Path) -> None:
    """P3, Fig. 5 and section 3: an array of VGG-19 has 71.5 %, Sockeye's first has the most."""
    found = {each.model: each for each in distributions()}
    assert found["vgg19"].largest_share == pytest.approx(0.715, abs=0.001)
    sockeye = found["sockeye"].elems
    assert sockeye.index(max(sockeye)) == 0
    assert sum(found["resnet50"].elems) == 25_557_032
    distribution.main(str(tmp_path))
    assert (tmp_path / "figure-6-distribution.png").stat().st_size > 10_000
