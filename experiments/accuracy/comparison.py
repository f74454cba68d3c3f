"""Tables and charts of what has been trained."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.accuracy.studies import ASGD, CODECS, DGC_CODEC, Run, Trained
from experiments.accuracy.tasks import TASKS, Task
from experiments.accuracy.training import EXACT, Outcome
from experiments.chart import Chart
from foreprop.report.style import OTHER, STYLES, Style, lighter

_STYLE_OF: Mapping[str, Style] = {
    "p3": STYLES["p3"],
    "SSP": STYLES["ring"],
    "ASGD": STYLES["kvstore"],
    "DC-ASGD": STYLES["ddp"],
    DGC_CODEC: STYLES["ddp"],
}
_CHART_IN = (6.0, 3.8)


def offered(scores: Sequence[float], exact: Sequence[float], *, lower_is_better: bool) -> bool:
    """Whether ``auto`` may offer the codec: its mean is at most a deviation worse than exact's."""
    difference = statistics.mean(scores) - statistics.mean(exact)
    return (difference if lower_is_better else -difference) <= statistics.stdev(exact)


def lines_of(study: str, trained: Sequence[Trained]) -> Iterator[str]:
    """A table in Markdown, of one task."""
    task = TASKS[trained[0].run.task]
    if study == CODECS:
        return _codec_lines(task, trained)
    return _apart_lines(task, trained) if study == ASGD else _dgc_lines(task, trained)


def _codec_lines(task: Task, trained: Sequence[Trained]) -> Iterator[str]:
    exact = [each.outcome.score for each in trained if each.run.codec == EXACT]
    yield f"{_heading(task, trained[0].run)}; exact's deviation {statistics.stdev(exact):.2f}"
    yield ""
    yield f"| codec | push, bytes per element | reply | {task.unit} | range | to exact | offered |"
    yield "|---|---|---|---|---|---|---|"
    for codec, outcomes in _by(trained, lambda run: run.codec).items():
        scores = [outcome.score for outcome in outcomes]
        verdict = offered(scores, exact, lower_is_better=task.lower_is_better)
        yield (
            f"| {codec} | {outcomes[0].push_bytes_per_elem:.3f} |"
            f" {outcomes[0].reply_bytes_per_elem:.3f} |"
            f" {statistics.mean(scores):.2f} | {min(scores):.2f} to {max(scores):.2f} |"
            f" {statistics.mean(scores) - statistics.mean(exact):+.2f} |"
            f" {'yes' if verdict else 'no'} |"
        )


def _dgc_lines(task: Task, trained: Sequence[Trained]) -> Iterator[str]:
    by_label = _by(trained, lambda run: run.label)
    p3, dgc = by_label["p3"], by_label[DGC_CODEC]
    yield _heading(task, trained[0].run)
    yield ""
    yield f"| learning rate, momentum, batch | p3, {task.unit} | DGC 99.9 % | difference |"
    yield "|---|---|---|---|"
    runs = [each.run for each in trained if each.run.codec == EXACT]
    for run, one, other in zip(runs, p3, dgc, strict=True):
        yield (
            f"| {run.lr:g}, {run.momentum:g}, {run.batch} | {one.score:.2f} | {other.score:.2f} |"
            f" {other.score - one.score:+.2f} |"
        )
    mean = statistics.mean(other.score - one.score for one, other in zip(p3, dgc, strict=True))
    yield f"| mean | | | {mean:+.2f} |"


def _apart_lines(task: Task, trained: Sequence[Trained]) -> Iterator[str]:
    by_label = {each.run.label: each.outcome for each in trained}
    worst = _worst(task, [outcome.score for outcome in by_label.values()])
    yield _heading(task, trained[0].run)
    yield ""
    yield f"| | {task.unit} | time, s | to {worst:.2f}, s | of p3's |"
    yield "|---|---|---|---|---|"
    first_s = time_to(task, by_label["p3"], worst)
    for label, outcome in by_label.items():
        until_s = time_to(task, outcome, worst)
        yield (
            f"| {label} | {outcome.score:.2f} | {outcome.course[-1].time_s:.1f} |"
            f" {until_s:.1f} | {until_s / first_s:.2f} |"
        )


def time_to(task: Task, outcome: Outcome, score: float) -> float:
    """When the score was reached, in a line between two points; it must be, at the end at least."""
    epoch_s, before = 0.0, None
    for point in outcome.course:
        good = point.score <= score if task.lower_is_better else point.score >= score
        if good:
            if before is None or before == point.score:
                return point.time_s
            share = (score - before) / (point.score - before)
            return epoch_s + share * (point.time_s - epoch_s)
        epoch_s, before = point.time_s, point.score
    raise ValueError(f"{score} is never reached")


def chart_of(study: str, trained: Sequence[Trained]) -> Chart:
    """Fig. 11: bands from the worst to the best by epoch. Fig. 15: scores by time."""
    task = TASKS[trained[0].run.task]
    by_label = _by(trained, lambda run: run.label)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for label, outcomes in by_label.items():
            style = _STYLE_OF.get(label.partition(",")[0], OTHER)
            if study == ASGD:
                _draw_course(axes, label, outcomes[0], style)
            else:
                _draw_band(axes, label, outcomes, style)
        shortened = f"{trained[0].run.epochs} epochs"
        axes.set(
            title=f"{task.title}, {shortened}",
            xlabel="s, simulated" if study == ASGD else "epoch",
            ylabel=task.unit,
        )
        axes.legend()

    return Chart(whole=draw, whole_in=_CHART_IN, parts=[])


def _draw_course(axes: Axes, label: str, outcome: Outcome, style: Style) -> None:
    times_s, scores = zip(*((p.time_s, p.score) for p in outcome.course), strict=True)
    axes.plot(
        times_s, scores, label=label, color=style.light, marker=style.marker, linestyle=style.dashes
    )


def _draw_band(axes: Axes, label: str, outcomes: Sequence[Outcome], style: Style) -> None:
    epochs = [point.epoch for point in outcomes[0].course]
    scores = [*zip(*([p.score for p in o.course] for o in outcomes), strict=True)]
    low, high = [min(each) for each in scores], [max(each) for each in scores]
    axes.fill_between(epochs, low, high, color=lighter(style, 0.4, "", "-").light, alpha=0.5)
    means = [statistics.mean(each) for each in scores]
    axes.plot(epochs, means, label=label, color=style.light, marker=style.marker)


def _heading(task: Task, run: Run) -> str:
    clock = f"; {run.clock}" if run.clock else ""
    part = f" of the first {run.part:.0%} of the examples" if run.part < 1 else ""
    return f"{task.title}; {run.ranks} workers, {run.epochs} epochs{part}{clock}"


def _worst(task: Task, scores: Sequence[float]) -> float:
    return max(scores) if task.lower_is_better else min(scores)


def _by(trained: Sequence[Trained], key: Callable[[Run], str]) -> dict[str, list[Outcome]]:
    """In the order in which they come first."""
    found: dict[str, list[Outcome]] = {}
    for each in trained:
        found.setdefault(key(each.run), []).append(each.outcome)
    return found
