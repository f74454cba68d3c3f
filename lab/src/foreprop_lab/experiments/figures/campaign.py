"""``foreprop lab figures``: measure what the figures need and is not measured yet, and draw them.

Each measurement's outcome is in ``runs/<key>.json`` as soon as it is known, under a key that
differs for whatever would be measured differently: a restart only measures what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from foreprop.errors import ForepropError
from foreprop.tools.compare.result import write_records
from foreprop.tools.report.document import write_document
from foreprop.tools.report.timeline import Timeline
from foreprop_lab.experiments.chart import Chart, write_chart
from foreprop_lab.experiments.figures import sweeps
from foreprop_lab.experiments.figures.charts import (
    throughput_chart,
    timeline_chart,
    utilisation_chart,
)
from foreprop_lab.experiments.figures.curves import (
    Measured,
    bandwidth_panels,
    nodes_panels,
    slice_size_panels,
    utilisation_panels,
)
from foreprop_lab.experiments.figures.keptruns import (
    KeptRun,
    maybe_read_run,
    remove_traces,
    timelines_from,
    timelines_of,
    write_run,
)
from foreprop_lab.experiments.figures.machine import machine_facts
from foreprop_lab.experiments.figures.page import Drawn, Story, render_page
from foreprop_lab.experiments.figures.pictures import inline_parts
from foreprop_lab.experiments.figures.sweeps import FIGURES, Measurement, plan_measurements
from foreprop_lab.setting.labsetting import LabSetting
from foreprop_lab.setting.records import Record

PAGE = "index.html"
_NAMES = {
    sweeps.BANDWIDTH: "figure-1-bandwidth",
    sweeps.UTILISATION: "figure-2-utilisation",
    sweeps.NODES: "figure-3-nodes",
    sweeps.SLICE_SIZE: "figure-4-slice-size",
    sweeps.TIMELINE: "figure-5-timeline",
}


class Outcome(Protocol):
    """The result of a run of the lab: `foreprop_lab.lab.run.LabResult`."""

    @property
    def records(self) -> list[Record]: ...
    @property
    def samples(self) -> dict[str, list[tuple[float, int, int]]]: ...
    @property
    def notices(self) -> list[str]: ...


class Measure(Protocol):
    """The function that measures a setting: `foreprop_lab.lab.run.run_lab`."""

    def __call__(self, setting: LabSetting, *, progress: Callable[[str], None]) -> Outcome: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures that were made; ``failed`` has the reason of each measurement that failed."""

    page: Path
    records: list[Record]
    failed: list[str]


def make_figures(
    out: Path,
    *,
    quick: bool,
    console: Console,
    measure: Measure,
    only: Collection[int] = FIGURES,
    iterations: int | None = None,
    mxnet_python: Path | None = None,
    command: str = "",
) -> Figures:
    """Measure what is missing in ``out``, then write figures, their data, results.json, the page.

    A measurement that fails is reported and left out; the next start tries it again. Raises
    `ConfigError` for unknown figures, and whatever interrupts it: all finished measurements are
    kept.
    """
    (out / "runs").mkdir(parents=True, exist_ok=True)
    effort = sweeps.QUICK if quick else sweeps.FULL
    measurements = plan_measurements(
        effort,
        traces=(out / "traces").resolve(),
        only=only,
        iterations=iterations,
        mxnet_python=mxnet_python,
    )
    campaign = _Campaign(out=out, console=console, measure=measure, measurements=measurements)
    campaign.run()
    records = [record for run in campaign.kept.values() for record in run.records]
    write_records(out / "results.json", records)
    drawn = [_draw(out, number, campaign) for number in FIGURES if number in only]
    story = Story(
        quick=quick,
        command=command,
        figures=[figure for figure in drawn if figure is not None],
        runs=[(m, campaign.kept[m.key]) for m in measurements if m.key in campaign.kept],
        failed=campaign.failed,
    )
    write_document(out / PAGE, render_page(story))
    return Figures(page=out / PAGE, records=records, failed=campaign.failed)


@dataclass(slots=True)
class Pace:
    """Estimates how long the rest takes: the expected time, corrected by how long the past took."""

    expected_s: list[float]
    """The expected time of each measurement that is to be made, in order."""
    done: int = 0
    took_s: float = 0.0

    def finish(self, took_s: float) -> None:
        self.done += 1
        self.took_s += took_s

    def left_s(self, running_s: float = 0.0) -> float:
        """The time left, if the current measurement has been running for ``running_s``."""
        past_s = sum(self.expected_s[: self.done])
        factor = self.took_s / past_s if past_s else 1.0
        current = self.expected_s[self.done : self.done + 1]
        later_s = factor * sum(self.expected_s[self.done + 1 :])
        return later_s + max(0.0, factor * sum(current) - running_s)


@dataclass(slots=True, kw_only=True)
class _Campaign:
    """The measurements, and the kept runs by key."""

    out: Path
    console: Console
    measure: Measure
    measurements: Sequence[Measurement]
    kept: dict[str, KeptRun] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=machine_facts)

    def run(self) -> None:
        for measurement in self.measurements:
            run = maybe_read_run(self._path(measurement))
            if run is not None:
                self.kept[measurement.key] = run
        missing = [m for m in self.measurements if m.key not in self.kept]
        self._announce(missing)
        if missing:
            self._measure_all(missing)

    def _path(self, measurement: Measurement) -> Path:
        return self.out / "runs" / f"{measurement.key}.json"

    def _announce(self, missing: Sequence[Measurement]) -> None:
        there = len(self.measurements) - len(missing)
        words = f"{len(self.measurements)} measurements, {there} of them made before"
        if missing:
            words += f"; the rest takes about {duration(sum(m.expected_s() for m in missing))}"
        self.console.print(words)

    def _measure_all(self, missing: Sequence[Measurement]) -> None:
        pace = Pace([m.expected_s() for m in missing])
        clock = _TimeLeft(pace)
        columns = (BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"), clock)
        bar = Progress(
            *columns,
            TextColumn("{task.description}"),
            console=self.console,
            refresh_per_second=1,  # it draws in a thread of its own, beside what is measured
            transient=True,
        )
        with bar:
            task = bar.add_task("", total=len(missing))
            for number, measurement in enumerate(missing, 1):
                clock.restart()
                words = self._measure_one(measurement, bar, task)
                pace.finish(clock.running_s)
                bar.advance(task)
                left = f"about {duration(pace.left_s())} left" if number < len(missing) else "done"
                line = f"{number}/{len(missing)} {escape(words)}; {left}"
                self.console.print(line, soft_wrap=True)

    def _measure_one(self, measurement: Measurement, bar: Progress, task: TaskID) -> str:
        """Measure, keep the run, and return the outcome in words."""
        title = measurement.title

        def progress(words: str) -> None:
            bar.update(task, description=escape(f"{title}: {words}"))

        progress("starting")
        try:
            run = self._kept_run(measurement, progress)
        except ForepropError as error:
            self.failed.append(f"{title}: {error}")
            return f"{title}: FAILED, {error}"
        write_run(self._path(measurement), run)
        self.kept[measurement.key] = run
        return f"{title}: {_steps_in_words(run.records)}"

    def _kept_run(self, measurement: Measurement, progress: Callable[[str], None]) -> KeptRun:
        setting, started = measurement.setting, time.monotonic()
        if setting.trace is not None:
            remove_traces(setting.trace)
        outcome = self.measure(setting, progress=progress)
        return KeptRun(
            title=measurement.title,
            taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
            took_s=time.monotonic() - started,
            machine=self.machine,
            records=outcome.records,
            samples=outcome.samples,
            timelines=timelines_from(setting),
            notices=outcome.notices,
        )


class _TimeLeft(ProgressColumn):
    """A progress column with about how long the rest takes; its thread only reads."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self._started = time.monotonic()

    @property
    def running_s(self) -> float:
        return time.monotonic() - self._started

    def restart(self) -> None:
        self._started = time.monotonic()

    def render(self, task: Task) -> Text:
        return Text(f"about {duration(self._pace.left_s(self.running_s))} left")


def duration(seconds: float) -> str:
    """A duration in words: 40 s, 12 min, 1 h 35 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def _steps_in_words(records: Sequence[Record]) -> str:
    return ", ".join(
        f"{r.system} {r.iteration_s.median:.3f} s{' (CPU-bound)' if r.cpu_bound else ''}"
        for r in records
    )


def _draw(out: Path, number: int, campaign: _Campaign) -> Drawn | None:
    """Write a figure's files; return what the page shows of it, or None if nothing was measured."""
    runs = [
        (m.setting, campaign.kept[m.key])
        for m in campaign.measurements
        if number in m.figures and m.key in campaign.kept
    ]
    if not runs:
        return None
    timelines: list[Timeline] = []
    if number == sweeps.UTILISATION:
        panels = [
            panel for _, run in runs for panel in utilisation_panels(run.records, run.samples)
        ]
        if not panels:
            return None
        chart, data = utilisation_chart(panels), msgspec.json.encode(panels)
    elif number == sweeps.TIMELINE:
        timelines = timelines_of(runs[0][1])
        if not timelines:
            return None
        chart, data = timeline_chart(timelines), msgspec.json.encode(timelines)
    else:
        chart, data = _throughput(number, [(setting, run.records) for setting, run in runs])
    write_chart(out, _NAMES[number], chart, data)
    return Drawn(
        number=number,
        parts=inline_parts(_NAMES[number], chart),
        systems=chart.systems,
        timelines=timelines,
    )


def _throughput(number: int, runs: Sequence[Measured]) -> tuple[Chart, bytes]:
    panels = {
        sweeps.BANDWIDTH: bandwidth_panels,
        sweeps.NODES: nodes_panels,
        sweeps.SLICE_SIZE: slice_size_panels,
    }[number](runs)
    return throughput_chart(panels), msgspec.json.encode(panels)
