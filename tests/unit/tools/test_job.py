"""`foreprop report`: what traces say of a job, and the page about it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from traced_run import BACKWARD_MS, BYTES, FORWARD_MS, STEP_MS, WAIT_MS, facts, record_run
from typer.testing import CliRunner

from foreprop.engine.trace import TraceRecorder
from foreprop.errors import ConfigError
from foreprop.plan.planner import Candidate, PlanSetting, forecast
from foreprop.tools.cli.app import app
from foreprop.tools.report.job import (
    Predicted,
    WorkerSteps,
    busiest_rate,
    find_straggler,
    measure,
    predict_job,
    profile_of,
)
from foreprop.tools.report.jobpage import Selection, read_job, render_job
from foreprop.tools.report.timeline import StepSpan, step_spans
from foreprop.tools.report.tracefile import ProcessTrace, read_folder

COMPUTE_S = (STEP_MS - WAIT_MS) / 1e3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job")
    record_run(made)
    return made


@pytest.fixture
def traces(folder: Path) -> list[ProcessTrace]:
    return read_folder(folder)


def test_whole_steps_after_the_first_ones_are_measured(traces: list[ProcessTrace]) -> None:
    found = measure(traces[0])
    assert found.numbers == [3, 4, 5]  # 1 and 2 learn the loop, the last one has no end
    assert found.median_s == pytest.approx(STEP_MS / 1e3, rel=1e-3)
    assert found.waiting_share == pytest.approx(WAIT_MS / STEP_MS, rel=1e-2)
    assert found.busy_s == pytest.approx(COMPUTE_S, rel=1e-3)
    pushed = BYTES["conv.weight"] + BYTES["fc.weight"] / 2 + BYTES["fc.weight"]
    assert found.sent_bytes == pytest.approx(pushed)
    assert found.received_bytes == pytest.approx(pushed)
    assert found.typical_step() in (3, 4)


def test_a_gap_between_windows_of_steps_is_no_step(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "worker-0.x.trace.json", "worker 0", 0, "1-3,7-9")
    zero = recorder.now_ns()
    for step in range(1, 10):
        for place, name in enumerate(("forward", "backward")):
            start = zero + (step * 100 + place * 40) * 1_000_000
            recorder.span(name, "layer", start, stop_ns=start + 40_000_000, step=step)
    recorder.write()
    found = measure(read_folder(tmp_path)[0])
    assert set(found.numbers) <= {1, 2, 3, 7, 8, 9}
    assert max(found.step_s) == pytest.approx(0.1, rel=1e-2)


def test_one_step_is_too_few(tmp_path: Path) -> None:
    record_run(tmp_path, steps=1)
    with pytest.raises(ConfigError, match="record more steps"):
        read_job(Selection(folder=tmp_path))


def test_layers_have_their_own_times_without_waiting(traces: list[ProcessTrace]) -> None:
    profile = profile_of(traces[0].about, traces[0], measure(traces[0]))
    assert [array.name for array in profile.arrays] == ["conv.weight", "fc.weight"]
    for array in profile.arrays:
        assert array.forward_s == pytest.approx(FORWARD_MS / 1e3, rel=1e-2)
    times = [array.backward_s for array in profile.arrays]
    assert times == pytest.approx([0.02, BACKWARD_MS / 1e3], rel=1e-2)


def test_predictions_are_the_planners_for_these_times(traces: list[ProcessTrace]) -> None:
    measured = measure(traces[0])
    about = traces[0].about
    found = predict_job(about, traces[0], measured, traces)
    setting = PlanSetting(
        profile=profile_of(about, traces[0], measured),
        compute_s=measured.busy_s,
        nodes=2,
        rate_bits_per_s=1e9,
    )
    assert found.rate_is_given
    assert found.ddp_s == forecast(setting, Candidate("ddp")).step_s
    assert found.limit_s == setting.limit_s
    assert found.ddp_s >= found.limit_s >= measured.busy_s
    slower = predict_job(about, traces[0], measured, traces, rate_bits_per_s=1e6)
    assert slower.ddp_s is not None
    assert slower.ddp_s > 2 * found.ddp_s


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"nodes": 1}, "all ranks are on one machine"),
        ({"ranks": 3}, "different numbers of workers"),
        ({"parameters": []}, "names no parameters"),
    ],
)
def test_settings_that_cannot_be_predicted_are_reported(
    traces: list[ProcessTrace], changed: dict[str, Any], why: str
) -> None:
    about = {**facts(2, 1e9), **changed}
    found = predict_job(about, traces[0], measure(traces[0]), traces)
    assert why in found.why_not
    assert found.ddp_s is found.limit_s is None
    assert "does not say what was run" in predict_job({}, traces[0], measure(traces[0]), []).why_not


def test_half_the_bytes_on_the_wire_have_no_limit(traces: list[ProcessTrace]) -> None:
    about = {**facts(2, 1e9), "wire_dtype": "bfloat16"}
    found = predict_job(about, traces[0], measure(traces[0]), traces)
    assert found.ddp_s is not None
    assert found.limit_s is None


def test_without_a_rate_the_most_that_a_link_has_carried_counts(tmp_path: Path) -> None:
    record_run(tmp_path, rate=None)
    traces = read_folder(tmp_path)
    seen = busiest_rate(traces[0].about, traces)
    assert 5e6 < seen < 1e9
    job = read_job(Selection(folder=tmp_path))
    assert not job.predicted.rate_is_given
    assert job.predicted.rate_bits_per_s == seen
    page = render_job(job, command="foreprop report")
    assert "Links may be faster" in page


def spans(length_s: float) -> list[StepSpan]:
    return [StepSpan(n, n * length_s, (n + 1) * length_s, 0.01) for n in range(5)]


def test_the_rank_that_is_busy_longest_is_the_straggler() -> None:
    workers = [
        WorkerSteps(rank=rank, steps=spans(length), sent_bytes=0, received_bytes=0)
        for rank, length in enumerate((0.1, 0.1, 0.15))
    ]
    found = find_straggler(workers)
    assert found is not None
    assert found[0] == 2
    assert found[1] == pytest.approx(0.05)
    assert find_straggler(workers[:2]) is None
    assert find_straggler(workers[:1]) is None


def test_the_page_has_the_sentence_and_a_panel_for_each_worker(folder: Path) -> None:
    job = read_job(Selection(folder=folder))
    sentence = job.headline.replace("\N{NO-BREAK SPACE}", " ")
    assert re.fullmatch(
        r"A step takes 100 ms, of which 10% waits for the network; DDP would take [\d.]+ ms"
        r" \(predicted\), the limit is [\d.]+ ms",
        sentence,
    )
    page = render_job(job, command="foreprop report x").replace("\N{NO-BREAK SPACE}", " ")
    assert page.count("<figure>") == 2
    assert "slice 0" in page
    assert "400 KB" in page or "200 KB" in page
    assert "http" not in page.replace("http-equiv", ""), "a page needs no network"


@pytest.mark.parametrize(
    ("about", "awaited"),
    [
        ({"nodes": 2}, "the network"),
        ({"nodes": 1}, "others on its machine"),  # where no link is in the way
        ({}, "others"),
    ],
)
def test_only_machines_wait_for_a_network(
    about: dict[str, Any], awaited: str, folder: Path
) -> None:
    job = dataclasses.replace(
        read_job(Selection(folder=folder)),
        about=about,
        predicted=Predicted(why_not="said elsewhere"),
    )
    sentence = job.headline.replace("\N{NO-BREAK SPACE}", " ")
    assert sentence == f"A step takes 100 ms, of which 10% waits for {awaited}"


def test_workers_and_steps_can_be_chosen(folder: Path) -> None:
    job = read_job(Selection(folder=folder, workers=(1,), first_step=4, steps=1))
    assert job.subject.rank == 1
    (timeline,) = job.timelines
    assert timeline.preset == "worker 1"
    assert [span.step for span in step_spans(timeline.events)] == [4]
    with pytest.raises(ConfigError, match=r"worker is 7; .* workers 0, 1"):
        read_job(Selection(folder=folder, workers=(7,)))
    with pytest.raises(ConfigError, match="first_step is 50"):
        read_job(Selection(folder=folder, first_step=50))


def test_servers_alone_are_not_enough(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("server-*.trace.json"):
        shutil.copy(path, tmp_path)
    with pytest.raises(ConfigError, match="traces of servers only"):
        read_job(Selection(folder=tmp_path))


def test_the_command_writes_beside_the_traces(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(folder), "--rate", "100Mbit"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("A step takes 100 ms, of which 10% waits")
    assert (folder / "report.html").is_file()
    target = tmp_path / "no" / "page.html"
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(target)])
    assert result.exit_code == 2
    assert f"out is {target}" in result.stderr
