"""The page of `foreprop report`: how a user's own job spends its steps, from its traces."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.tools.report.document import (
    milliseconds,
    palette_css,
    percent,
    rate,
    render,
    write_document,
)
from foreprop.tools.report.job import Predicted, WorkerSteps, find_straggler, measure, predict_job
from foreprop.tools.report.timeline import Timeline, timeline_from_trace
from foreprop.tools.report.timeline_svg import draw_timelines, layer_names
from foreprop.tools.report.tracefile import ProcessTrace, latest_session, read_folder

MOST_PANELS = 4
"""How many workers' timelines are drawn if nobody says which."""
_MODEL_IS_OFF = 0.15
"""If the prediction of this very run is off by more, the others are doubtful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The parts of a folder that are to be shown."""

    folder: Path
    workers: Sequence[int] = ()
    """The ranks to draw; the page is about the first one. By default they are the first few."""
    first_step: int | None = None
    """The first step to draw; by default a typical one."""
    steps: int = 2
    rate_bits_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the page shows."""

    selection: Selection
    about: Mapping[str, Any]
    measured: Sequence[WorkerSteps]
    """Every worker that has left a trace."""
    subject: WorkerSteps
    predicted: Predicted
    timelines: Sequence[Timeline]
    recorded_s: float
    """When the trace was written, seconds since 1970."""

    @property
    def awaited(self) -> str:
        """Whom a worker waits for, in words: on one machine there is no network."""
        nodes = self.about.get("nodes", 0)
        return "the network" if nodes > 1 else "others on its machine" if nodes else "others"

    @property
    def headline(self) -> str:
        """The page's first sentence: time per step, share of waiting, and what is predicted."""
        subject, predicted = self.subject, self.predicted
        text = (
            f"A step takes {milliseconds(subject.median_s)}, of which"
            f" {percent(subject.waiting_share)} waits for {self.awaited}"
        )
        parts = []
        if predicted.ddp_s is not None:
            parts.append(f"DDP would take {milliseconds(predicted.ddp_s)} (predicted)")
        if predicted.limit_s is not None:
            parts.append(f"the limit is {milliseconds(predicted.limit_s)}")
        return f"{text}; {', '.join(parts)}" if parts else text


def read_job(selection: Selection) -> Job:
    """The folder's latest session; raises `ConfigError` for what is not there."""
    traces = latest_session(read_folder(selection.folder))
    workers = {trace.rank: trace for trace in traces if trace.rank is not None}
    if not workers:
        raise ConfigError(f"{selection.folder} has traces of servers only: get the workers', too")
    missing = [rank for rank in selection.workers if rank not in workers]
    if missing:
        there = ", ".join(map(str, workers))
        raise ConfigError(
            f"worker is {missing[0]}; {selection.folder} has traces of workers {there}"
        )
    shown = list(selection.workers) or sorted(workers)[:MOST_PANELS]
    measured = [measure(workers[rank]) for rank in sorted(workers)]
    subject = next(worker for worker in measured if worker.rank == shown[0])
    about = next((trace.about for trace in workers.values() if trace.about), {})
    return Job(
        selection=selection,
        about=about,
        measured=measured,
        subject=subject,
        predicted=predict_job(
            about, workers[subject.rank], subject, traces, rate_bits_per_s=selection.rate_bits_per_s
        ),
        timelines=_timelines(selection, subject, [workers[rank] for rank in shown]),
        recorded_s=max(trace.written_s for trace in traces),
    )


def _timelines(
    selection: Selection, subject: WorkerSteps, shown: Sequence[ProcessTrace]
) -> list[Timeline]:
    first = subject.typical_step() if selection.first_step is None else selection.first_step
    steps = selection.steps
    if selection.first_step is None:  # as many as are there
        numbers = set(subject.numbers)
        while steps > 1 and first + steps - 1 not in numbers:
            steps -= 1
    return [
        Timeline(
            preset=trace.process,
            events=timeline_from_trace({"traceEvents": trace.spans}, first_step=first, steps=steps),
        )
        for trace in shown
    ]


def write_job_report(path: Path, job: Job, *, command: str) -> None:
    """Write the page; raises `ConfigError` if it cannot be written."""
    try:
        write_document(path, render_job(job, command=command))
    except OSError as error:
        raise ConfigError(f"out is {path}, which cannot be written: {error.strerror}") from error


class _Bar(NamedTuple):
    name: str
    step_s: float
    wait_s: float | None = None


def render_job(job: Job, *, command: str) -> str:
    subject, predicted = job.subject, job.predicted
    wait_s = subject.median_s * subject.waiting_share
    bars = [_Bar(f"worker {subject.rank}", subject.median_s, wait_s)]
    if predicted.ddp_s is not None:
        bars.append(_Bar("DDP, predicted", predicted.ddp_s))
    if predicted.limit_s is not None:
        bars.append(_Bar("limit", predicted.limit_s))
    longest_s = max(bar.step_s for bar in bars)
    marks = {"work": "computing and other work", "wait": "waiting for parameters or norms"}
    if any(bar.wait_s is None for bar in bars):
        marks["whole"] = "both, as predicted"
    count = "one worker" if len(job.timelines) == 1 else f"{len(job.timelines)} workers"
    return render(
        "job.html",
        styles=palette_css(layer_names(job.timelines)),
        title=f"foreprop: {job.selection.folder}",
        headline=job.headline,
        lede=_lede(job),
        bars=bars,
        share=lambda seconds: f"{seconds / longest_s * 100:.2f}%",
        marks=marks,
        notes=_notes(job),
        workers=job.measured,
        words=f"The same steps of {count}, on one time scale.",
        timelines=draw_timelines(job.timelines),
        facts=_facts(job),
        command=command,
    )


def _lede(job: Job) -> str:
    about, subject = job.about, job.subject
    low, high = subject.deciles_s
    text = (
        f"Worker {subject.rank}, {counted(len(subject.steps), 'step')}; most take"
        f" {milliseconds(low)} to {milliseconds(high)} (p10 to p90)."
    )
    if about:
        text = f"{counted(about['ranks'], 'worker')} on {counted(about['nodes'], 'node')}. {text}"
    late = find_straggler(job.measured)
    if late is not None:
        rank, late_s = late
        text += (
            f" Worker {rank} is busy {milliseconds(late_s)} longer per step than the others, who"
            " wait for it: no network is to blame for that part."
        )
    return text


def _notes(job: Job) -> list[str]:
    """What a reader must know before believing the predictions."""
    predicted, subject = job.predicted, job.subject
    if predicted.why_not:
        return [f"Nothing is predicted: {predicted.why_not}."]
    link_rate = predicted.rate_bits_per_s or 0.0
    notes = []
    if predicted.rate_is_given:
        notes.append(
            f"Predicted for links of {rate(link_rate)} by the model of lab/docs/model.md, from this"
            " worker's own times; what it is busy with counts as computing."
        )
    else:
        notes.append(
            f"Predicted for links of {rate(link_rate)}, the most that one has carried in this"
            " trace. Links may be faster, and then DDP takes less: say theirs with --rate."
        )
    if predicted.p3_s is not None:
        off = subject.median_s / predicted.p3_s - 1
        if abs(off) > _MODEL_IS_OFF:
            notes.append(
                f"For p3 the model would say {milliseconds(predicted.p3_s)}, and this run took"
                f" {milliseconds(subject.median_s)}: its other numbers may be off by as much."
            )
    if predicted.limit_s is None and predicted.ddp_s is not None:
        notes.append("No limit is given: it is known for float32 on the wire only.")
    return notes


def _facts(job: Job) -> dict[str, object]:
    about = job.about
    when = datetime.datetime.fromtimestamp(job.recorded_s, datetime.UTC)
    found: dict[str, object] = {"recorded": f"{when:%Y-%m-%d %H:%M} UTC"}
    if not about:
        return found
    size_bytes = sum(p["itemsize"] * math.prod(p["shape"]) for p in about["parameters"])
    return found | {
        "workers": f"{about['ranks']} on {counted(about['nodes'], 'node')}",
        "servers": about["servers"],
        "parameters": f"{len(about['parameters']):,}, {size_bytes / 1e6:,.1f} MB",
        "slices": f"{about['slice_elems']:,} elements",
        "architecture": about["architecture"] or "p2p",
        "foreprop": about["version"],
        "torch": about["torch"],
    }
