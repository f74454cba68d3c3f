"""The report of `foreprop demo`: one HTML file that needs neither a network nor other files.

`render_report` is pure. The page is written for someone who has not read the paper: it first shows
what was measured, then the timeline that explains it, then what exactly was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.tools.report.document import (
    ABSENT,
    TIMES,
    milliseconds,
    palette_css,
    percent,
    rate,
    render,
    write_document,
)
from foreprop.tools.report.timeline import Timeline
from foreprop.tools.report.timeline_svg import draw_timelines, layer_names

_SUBJECT = "p3"
_BASELINES = ("ddp", "kvstore")
"""The baseline is the first of these that was run."""
_NO_DIFFERENCE = 0.02
"""A ratio closer to 1 than this is not called a win or a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What the run of one preset, or of a peer, measured. Times are seconds per training step."""

    preset: str
    step_s_median: float
    step_s_p10: float
    step_s_p90: float
    samples_per_s: float
    waiting_share: float | None
    """The share of a step, 0 to 1, spent waiting for parameters; None if it is not known."""
    test_accuracy: float
    """The share of right answers, 0 to 1."""
    weights_sha256: str
    steps: int
    compute_s: float | None = None
    """The time per step without communication, if that was measured."""
    sums_alike: bool = True
    """Whether it adds gradients in the presets' order, so that its weights must be theirs."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step_s_median) and self.step_s_median > 0):
            raise ConfigError(
                f"step_s_median of {self.preset} is {self.step_s_median}; it must be above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContext:
    """The setting and the machine that the runs had."""

    title: str
    model: str
    workers: int
    servers: int
    rate_bits_per_s: float | None
    """The rate of each link in each direction; None if the links were not shaped."""
    batch_size: int
    """Samples per worker and step."""
    machine: Mapping[str, str]
    command: str
    foreprop_version: str
    torch_version: str
    links: str = ""
    """How the links' rate is limited, in words."""


def write_report(
    path: Path, context: ReportContext, runs: Sequence[RunSummary], timelines: Sequence[Timeline]
) -> None:
    """Write the report to `path`, which either keeps its old content or has the whole new one."""
    write_document(path, render_report(context, runs, timelines))


def render_report(
    context: ReportContext, runs: Sequence[RunSummary], timelines: Sequence[Timeline]
) -> str:
    """The whole page; its look is in report.css beside this file."""
    longest_s = max((max(run.step_s_p90, run.step_s_median) for run in runs), default=0.0)
    return render(
        "report.html",
        package=__package__,
        styles=palette_css(layer_names(timelines)),
        title=context.title,
        headline=headline(runs),
        lede=_lede(context, runs),
        runs=runs,
        share=lambda seconds: f"{seconds / longest_s * 100:.2f}%",
        marks=_marks(runs),
        verdict=same_weights(runs),
        timelines=draw_timelines(timelines),
        facts={
            "model": context.model,
            "workers": context.workers,
            "servers": context.servers,
            "network": ", ".join(filter(None, [_rate(context), context.links])),
            "batch size": f"{counted(context.batch_size, 'sample')} per worker",
            "steps": _listing(list(dict.fromkeys(f"{run.steps:,}" for run in runs)) or [ABSENT]),
            **context.machine,
            "foreprop": context.foreprop_version,
            "torch": context.torch_version,
        },
        command=context.command,
    )


def headline(runs: Sequence[RunSummary]) -> str:
    """What was measured, in one sentence, which also says when p3 does not win."""
    pair = _pair(runs)
    if pair is None:
        return f"{runs[0].preset} takes {_step(runs[0])} per step" if runs else "Nothing was run"
    subject, baseline = pair
    ratio = subject.step_s_median / baseline.step_s_median
    if abs(ratio - 1) <= _NO_DIFFERENCE:
        return (
            f"{subject.preset} does not win here: a step takes about as long as with "
            f"{baseline.preset} ({ratio:.2f}{TIMES})"
        )
    if ratio > 1:
        claim = f"takes {ratio:.2f}{TIMES} the time of {baseline.preset} per step"
        return f"{subject.preset} does not win here: it {claim}"
    return (
        f"{subject.preset} trains {1 / ratio:.2f}{TIMES} as fast as {baseline.preset}:"
        f" {_step(subject)} per step instead of {_step(baseline)}"
    )


def _pair(runs: Sequence[RunSummary]) -> tuple[RunSummary, RunSummary] | None:
    """The run that the page is about and the one that it is compared with."""
    if len(runs) < 2:
        return None
    others = list(runs)
    presets = [run.preset for run in runs]
    subject = others.pop(presets.index(_SUBJECT) if _SUBJECT in presets else -1)
    by_name = {run.preset: run for run in others}
    found = [by_name[name] for name in _BASELINES if name in by_name]
    return subject, (found or others)[0]


def _lede(context: ReportContext, runs: Sequence[RunSummary]) -> str:
    setting = (
        f"Training {context.model} on {counted(context.workers, 'worker')} and"
        f" {counted(context.servers, 'server')}, {_rate(context)}"
    )
    pair = _pair(runs)
    if pair is None:
        return f"{setting}."
    subject, baseline = pair
    others = "".join(f", {_step(run)} with {run.preset}" for run in runs if run not in pair)
    lines = [
        f"{setting}: {_step(subject)} per step with {subject.preset}, {_step(baseline)} with "
        f"{baseline.preset}{others}."
    ]
    if subject.waiting_share is not None and baseline.waiting_share is not None:
        lines.append(
            f"Waiting for parameters takes {percent(subject.waiting_share)} of a step, against "
            f"{percent(baseline.waiting_share)}."
        )
    if subject.step_s_p90 >= baseline.step_s_p10 and baseline.step_s_p90 >= subject.step_s_p10:
        lines.append(
            "The two spread over overlapping ranges (p10 to p90 in the table), so read the "
            "difference with care."
        )
    if baseline.waiting_share is not None and baseline.waiting_share < 0.05:
        lines.append(
            f"{baseline.preset} itself hardly waits in this setting: there is little to hide, and "
            "a slower network or a larger model would show more."
        )
    return " ".join(lines)


def _rate(context: ReportContext) -> str:
    if context.rate_bits_per_s is None or not math.isfinite(context.rate_bits_per_s):
        return "links not limited"
    return f"links of {rate(context.rate_bits_per_s)}"


def _step(run: RunSummary) -> str:
    return milliseconds(run.step_s_median)


def _marks(runs: Sequence[RunSummary]) -> dict[str, str]:
    """The classes in report.css that bars have, with their meaning."""
    if not runs:
        return {}
    marks = {"work": "computing and other work", "wait": "waiting for parameters"}
    if any(run.waiting_share is None for run in runs):
        marks["whole"] = "both, which cannot be told apart"
    marks["spread"] = "p10 to p90"
    if any(run.compute_s is not None for run in runs):
        marks["floor"] = "without communication"
    return marks


def same_weights(runs: Sequence[RunSummary]) -> tuple[str, str]:
    """Whether all presets ended with the same bits, in words, and "same", "different" or ""."""
    alike = [run for run in runs if run.sums_alike]
    others = [run.preset for run in runs if not run.sums_alike]
    aside = ""
    if others:
        aside = (
            f" Those of {_listing(others)} differ in their last bits: gradients are added in"
            " another order there."
        )
    if len(alike) < 2:
        return f"Only one preset was run, so there are no weights to compare with.{aside}", ""
    groups: dict[str, list[str]] = {}
    for run in alike:
        groups.setdefault(run.weights_sha256, []).append(run.preset)
    if len(groups) == 1:
        names = _listing([run.preset for run in alike])
        return f"The final weights of {names} are identical, bit for bit.{aside}", "same"
    differing = "; ".join(f"{_listing(names)}: {digest[:12]}" for digest, names in groups.items())
    why = ""
    if len({run.steps for run in alike}) > 1:
        why = " The runs have different numbers of steps, so their weights cannot be the same."
    return (
        f"The final weights are NOT identical across the presets ({differing}).{why}",
        "different",
    )


def _listing(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
