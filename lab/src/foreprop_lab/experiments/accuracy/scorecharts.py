"""Charts of scores by simulated time: those of P3's Figs. 11 and 15, and of the codecs."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from foreprop.tools.report.charts import OTHER, STYLES, Style
from foreprop_lab.experiments.accuracy.comparison import (
    PAPERS_LOSS,
    mean_course,
    mean_loss,
    outcomes_by,
)
from foreprop_lab.experiments.accuracy.studies import ASGD, CODECS, DGC, DGC_CODEC, Trained
from foreprop_lab.experiments.accuracy.tasks import TASKS, Task
from foreprop_lab.experiments.accuracy.training import Outcome, Point
from foreprop_lab.experiments.chart import Chart, lighter

_STYLE_OF: Mapping[str, Style] = {
    "p3": STYLES["p3"],
    "SSP": STYLES["ring"],
    "ASGD": STYLES["kvstore"],
    "DC-ASGD": STYLES["ddp"],
    DGC_CODEC: STYLES["ddp"],
    "bf16": STYLES["mxnet-kvstore"],
    "int8": STYLES["ring"],
    "int4": STYLES["hybrid"],
    "int2": STYLES["kvstore"],
    "terngrad": STYLES["tensorflow"],
    "1bit": STYLES["wfbp"],
    "topk:0.01": STYLES["slicing"],
}
_CHART_IN = (6.0, 3.8)
_GRID = 60
"""The number of times at which a band is drawn."""
_SHOWN_FACTOR = 2.5
"""Perplexities above this many times the best are not shown: the table has those that diverged."""
FILES = {
    "accuracy-asgd": ASGD,
    "accuracy-asgd-fashion": ASGD,
    "accuracy-dgc": DGC,
    "accuracy-dgc-fashion": DGC,
    "accuracy-codecs-cifar": CODECS,
    "accuracy-codecs-wikitext": CODECS,
}
"""The files of lab/docs/results, with the study and task of each."""


def chart_of(study: str, trained: Sequence[Trained]) -> Chart:
    """The chart of a study's trainings of one task.

    DGC (Fig. 11) has bands from the worst setting to the best. ASGD (Fig. 15) has the mean of the
    seeds, and their range. Codecs have seed 0's course, and the seeds' range at the end.
    """
    task, run = TASKS[trained[0].run.task], trained[0].run
    by_label = outcomes_by(trained, lambda run: run.label)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for label, outcomes in by_label.items():
            style = _STYLE_OF.get(label.partition(",")[0], OTHER)
            if study == DGC:
                _draw_settings(axes, label, outcomes, style)
            elif study == CODECS:
                _draw_codec(axes, label, outcomes, style)
            else:
                _draw_seeds(axes, label, outcomes, style)
        shortened = f"{run.epochs} epoch{'s' * (run.epochs > 1)}"
        if run.part < 1:
            shortened += f" of {run.part:.0%} of the data"
        axes.set(title=task.title, xlabel=f"s, simulated ({shortened})", ylabel=task.unit)
        if study == DGC:
            axes.text(0.98, 0.03, _losses(trained), transform=axes.transAxes, ha="right")
        if study == CODECS:
            _set_codec_axes(axes, task, by_label)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return Chart(whole=draw, whole_in=_CHART_IN, parts=[])


def decode(data: bytes) -> list[Trained]:
    """Read the JSON file that lies beside a chart."""
    return msgspec.json.decode(data, type=list[Trained])


def _losses(trained: Sequence[Trained]) -> str:
    return f"at the end {mean_loss(trained):.1f} points apart on average (paper: {PAPERS_LOSS})"


def _draw_seeds(axes: Axes, label: str, outcomes: Sequence[Outcome], style: Style) -> None:
    times_s, scores = _line(mean_course(outcomes).course)
    _plot(axes, label, times_s, scores, style)
    if len(outcomes) > 1:
        ranges = [*zip(*([p.score for p in outcome.course] for outcome in outcomes), strict=True)]
        _fill(axes, times_s, [min(each) for each in ranges], [max(each) for each in ranges], style)


def _draw_settings(axes: Axes, label: str, outcomes: Sequence[Outcome], style: Style) -> None:
    """Draw the band between the worst setting and the best.

    Settings have different steps, so scores at one moment are interpolated. A training that has
    ended keeps its score.
    """
    start_s = max(outcome.course[0].time_s for outcome in outcomes)
    end_s = max(outcome.course[-1].time_s for outcome in outcomes)
    times_s = [start_s + (end_s - start_s) * n / _GRID for n in range(_GRID + 1)]
    scores = [[score_at(outcome, at_s) for outcome in outcomes] for at_s in times_s]
    _fill(axes, times_s, [min(each) for each in scores], [max(each) for each in scores], style)
    axes.plot(times_s, [*map(statistics.fmean, scores)], label=f"{label}, mean", color=style.light)


def score_at(outcome: Outcome, at_s: float) -> float:
    """The score at a time, interpolated; the first or the last one outside of the course."""
    times_s, scores = _line(outcome.course)
    after = bisect_right(times_s, at_s)
    if after in (0, len(times_s)):
        return scores[min(after, len(scores) - 1)]
    share = (at_s - times_s[after - 1]) / (times_s[after] - times_s[after - 1])
    return scores[after - 1] + share * (scores[after] - scores[after - 1])


def _draw_codec(axes: Axes, label: str, outcomes: Sequence[Outcome], style: Style) -> None:
    """Draw the longest course, and the range of all last scores."""
    longest = max(outcomes, key=lambda outcome: len(outcome.course))
    _plot(axes, label if label != "p3" else "exact", *_line(longest.course), style)
    scores = [outcome.score for outcome in outcomes]
    middle, half = (max(scores) + min(scores)) / 2, (max(scores) - min(scores)) / 2
    end_s = longest.course[-1].time_s
    axes.errorbar([end_s], [middle], yerr=[half], color=style.light, capsize=3, linewidth=1)


def _set_codec_axes(axes: Axes, task: Task, by_label: Mapping[str, Sequence[Outcome]]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    if not task.lower_is_better:
        return
    best = min(outcome.score for outcomes in by_label.values() for outcome in outcomes)
    axes.set_ylim(0.9 * best, _SHOWN_FACTOR * best)


def _plot(
    axes: Axes, label: str, times_s: Sequence[float], scores: Sequence[float], style: Style
) -> None:
    axes.plot(
        times_s, scores, label=label, color=style.light, marker=style.marker, linestyle=style.dashes
    )


def _fill(
    axes: Axes, times_s: Sequence[float], low: Sequence[float], high: Sequence[float], style: Style
) -> None:
    axes.fill_between(times_s, low, high, color=lighter(style, 0.4, "", "-").light, alpha=0.5)


def _line(course: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.time_s for point in course], [point.score for point in course]
