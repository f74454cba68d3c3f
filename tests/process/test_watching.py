"""Two ranks that are watched: their log, what `foreprop top` and `foreprop report` make of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from traced_run import read_as_perfetto

from foreprop.engine.status import read_statuses
from foreprop.tools.cli.top import is_over
from foreprop.tools.report.jobpage import Selection, read_job, render_job
from foreprop.tools.report.perfetto import to_perfetto
from foreprop.tools.report.tracefile import read_folder, read_trace
from tests.process.harness import Zygote, wait_for, workers
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 8


def watched(folder: Path, **more: object) -> Scenario:
    settings = {
        "trace": str(folder / "trace"),
        "watch": str(folder / "watch"),
        "log_steps": 4,
        "link_rate_bits_per_s": 1e9,
    }
    return Scenario(steps=STEPS, settings=settings, **more)  # type: ignore[arg-type]


def test_a_run_is_logged_watched_and_reported(zygote: Zygote, tmp_path: Path) -> None:
    with workers(zygote, tmp_path, 2, watched(tmp_path), fork=1) as run:
        run.wait()
        assert run.codes() == [0, 0], run.output()
        told = [line for line in run.outputs[0].read_text().splitlines() if ": step " in line]
        assert [line.partition(" steps/s")[1] for line in told] == [" steps/s"] * 2, run.output()
        assert [line.split(":")[:2] for line in told] == [
            ["foreprop", " step 4"],
            ["foreprop", " step 8"],
        ]
        assert ": step " not in run.outputs[1].read_text()  # only rank 0 logs
        run.check_nothing_left()
    statuses = read_statuses(tmp_path / "watch")
    assert [(s.rank, s.state, s.step) for s in statuses] == [
        (0, "closed", STEPS),
        (1, "closed", STEPS),
    ]
    assert is_over(statuses)
    traces = read_folder(tmp_path / "trace")
    assert [t.process for t in traces] == ["worker 0", "worker 1", "server 0", "server 1"]
    events = to_perfetto(traces)["traceEvents"]
    read = read_as_perfetto(events)
    assert read.failures == []
    assert len(read.arrows) == sum(
        event["ph"] == "X" and event["cat"] == "push_sent" for event in events
    )
    assert {bound[0] for bound in read.arrows.values()} == {"push_sent"}
    job = read_job(Selection(folder=tmp_path / "trace"))
    assert "DDP would take" in job.headline
    assert "the limit is" in job.headline
    assert render_job(job, command="foreprop report").count("<figure>") == 2


@pytest.mark.long
def test_the_trace_of_a_rank_that_was_killed_is_there(zygote: Zygote, tmp_path: Path) -> None:
    scenario = watched(tmp_path, linger_s={"0": 100.0, "1": 100.0})
    with workers(zygote, tmp_path, 2, scenario, fork=1) as run:

        def recorded() -> bool:
            files = list((tmp_path / "trace").glob("worker-1.*.trace.json"))
            return bool(files) and b'"wait"' in files[0].read_bytes() and last_step(files[0])

        def last_step(path: Path) -> bool:
            return f'"step":{STEPS},'.encode() in path.read_bytes()

        wait_for(recorded, run)
        run.started[1].kill()
        (path,) = (tmp_path / "trace").glob("worker-1.*.trace.json")
        found = read_trace(path)
        assert {span["args"]["step"] for span in found.spans} >= set(range(1, STEPS + 1))
        assert found.about["ranks"] == 2


@pytest.mark.long
def test_errors_are_left_in_the_folder_by_every_rank(zygote: Zygote, tmp_path: Path) -> None:
    with workers(zygote, tmp_path, 2, watched(tmp_path, raise_at={"1": 5}), fork=1) as run:
        run.wait()
        first, second = read_statuses(tmp_path / "watch")
    assert (second.state, second.step) == ("failed", 4)
    assert second.error == "ValueError: the data are odd"
    assert first.state == "failed"
    assert "rank 1" in first.error
