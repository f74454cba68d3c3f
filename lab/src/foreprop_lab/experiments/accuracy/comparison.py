"""Tables of what has been trained, and which codecs are as good as exact."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from foreprop_lab.experiments.accuracy.studies import ASGD, CODECS, DGC_CODEC, Run, Trained
from foreprop_lab.experiments.accuracy.tasks import TASKS, Task
from foreprop_lab.experiments.accuracy.training import EXACT, Outcome, Point

PAPERS_LOSS = 0.4
"""The points by which DGC is below P3 on average (P3, section 5.6)."""


def offered(scores: Sequence[float], exact: Sequence[float], *, lower_is_better: bool) -> bool:
    """Whether ``auto`` may offer the codec: its mean is at most a deviation worse than exact's."""
    difference = statistics.mean(scores) - statistics.mean(exact)
    return (difference if lower_is_better else -difference) <= statistics.stdev(exact)


def verdicts(trained: Sequence[Trained]) -> dict[str, dict[str, bool]]:
    """By codec and task whether ``auto`` may offer it, of all trainings without a clock.

    A codec is compared with exact trainings of the same seeds and setting, and needs several seeds.
    """
    found: dict[str, dict[str, bool]] = {}
    plain = [each for each in trained if each.run.clock is None]
    for codec, of_codec in grouped(plain, lambda run: run.codec).items():
        for task, own in grouped(of_codec, lambda run: run.task).items():
            like = {_but_codec(each.run) for each in own}
            exact = [e for e in plain if e.run.codec == EXACT and _but_codec(e.run) in like]
            if len(exact) == 1:
                continue
            found.setdefault(codec, {})[task] = offered(
                [each.outcome.score for each in own],
                [each.outcome.score for each in exact],
                lower_is_better=TASKS[task].lower_is_better,
            )
    return found


def _but_codec(run: Run) -> tuple[object, ...]:
    return (run.task, run.ranks, run.batch, run.epochs, run.lr, run.momentum, run.seed, run.part)


def lines_of(study: str, trained: Sequence[Trained]) -> Iterator[str]:
    """The table of one task, in Markdown."""
    task = TASKS[trained[0].run.task]
    if study == CODECS:
        return _codec_lines(task, trained)
    return _asgd_lines(task, trained) if study == ASGD else _dgc_lines(task, trained)


def _codec_lines(task: Task, trained: Sequence[Trained]) -> Iterator[str]:
    exact = [each.outcome.score for each in trained if each.run.codec == EXACT]
    deviation = f"; exact's deviation {statistics.stdev(exact):.2f}" if len(exact) > 1 else ""
    yield f"{_heading(task, trained[0].run)}{deviation}"
    yield ""
    yield f"| codec | push, bytes per element | reply | {task.unit} | range | to exact | offered |"
    yield "|---|---|---|---|---|---|---|"
    for codec, outcomes in outcomes_by(trained, lambda run: run.codec).items():
        scores = [outcome.score for outcome in outcomes]
        verdict = "of one seed nobody knows"
        if len(exact) > 1:
            good = offered(scores, exact, lower_is_better=task.lower_is_better)
            verdict = "yes" if good else "no"
        yield (
            f"| {codec} | {outcomes[0].push_bytes_per_elem:.3f} |"
            f" {outcomes[0].reply_bytes_per_elem:.3f} |"
            f" {statistics.mean(scores):.2f} | {min(scores):.2f} to {max(scores):.2f} |"
            f" {statistics.mean(scores) - statistics.mean(exact):+.2f} | {verdict} |"
        )


def time_lines(trained: Sequence[Trained]) -> Iterator[str]:
    """The table of `timed` trainings with codecs: how long they take, and their last scores."""
    task = TASKS[trained[0].run.task]
    first = trained[0].run
    yield f"{first.clock}"
    yield ""
    yield f"| codec | trained in, s | of exact's | {task.unit} |"
    yield "|---|---|---|---|"
    by_codec = outcomes_by(trained, lambda run: run.codec)
    exact_s = by_codec[EXACT][0].course[-1].time_s
    for codec, outcomes in by_codec.items():
        end_s = outcomes[0].course[-1].time_s
        score = statistics.mean(outcome.score for outcome in outcomes)
        yield f"| {codec} | {end_s:.1f} | {end_s / exact_s:.2f} | {score:.2f} |"


def _dgc_lines(task: Task, trained: Sequence[Trained]) -> Iterator[str]:
    by_label = outcomes_by(trained, lambda run: run.label)
    p3, dgc = by_label["p3"], by_label[DGC_CODEC]
    yield _heading(task, trained[0].run)
    yield ""
    yield f"| learning rate, momentum, batch, seed | p3, {task.unit} | DGC 99.9 % | difference |"
    yield "|---|---|---|---|"
    runs = [each.run for each in trained if each.run.codec == EXACT]
    for run, one, other in zip(runs, p3, dgc, strict=True):
        yield (
            f"| {run.lr:g}, {run.momentum:g}, {run.batch}, {run.seed} | {one.score:.2f} |"
            f" {other.score:.2f} | {other.score - one.score:+.2f} |"
        )
    yield f"| mean; the paper's {-PAPERS_LOSS} | | | {-mean_loss(trained):+.2f} |"


def mean_loss(trained: Sequence[Trained]) -> float:
    """The points by which DGC is below P3 at the end, on average over a study's settings."""
    by_label = outcomes_by(trained, lambda run: run.label)
    pairs = zip(by_label["p3"], by_label[DGC_CODEC], strict=True)
    return statistics.mean(one.score - other.score for one, other in pairs)


def _asgd_lines(task: Task, trained: Sequence[Trained]) -> Iterator[str]:
    by_label = outcomes_by(trained, lambda run: run.label)
    means = {label: mean_course(outcomes) for label, outcomes in by_label.items()}
    worst = _worst(task, [outcome.score for outcome in means.values()])
    yield _heading(task, trained[0].run)
    yield ""
    yield f"| | {task.unit} | range | time, s | to {worst:.2f}, s | of p3's |"
    yield "|---|---|---|---|---|---|"
    first_s = time_to(task, means["p3"], worst)
    for label, outcome in means.items():
        until_s = time_to(task, outcome, worst)
        scores = [each.score for each in by_label[label]]
        yield (
            f"| {label} | {outcome.score:.2f} | {min(scores):.2f} to {max(scores):.2f} |"
            f" {outcome.course[-1].time_s:.1f} | {until_s:.1f} | {until_s / first_s:.2f} |"
        )


def mean_course(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean of several seeds' outcomes, whose scores were taken after the same steps."""
    columns = zip(*(outcome.course for outcome in outcomes), strict=True)
    return Outcome(
        [
            Point(
                points[0].epoch,
                statistics.fmean(point.time_s for point in points),
                statistics.fmean(point.score for point in points),
            )
            for points in columns
        ]
    )


def time_to(task: Task, outcome: Outcome, score: float) -> float:
    """When the score was reached, interpolated between two points; the last point must reach it."""
    before_s, before = 0.0, None
    for point in outcome.course:
        good = point.score <= score if task.lower_is_better else point.score >= score
        if good:
            if before is None or before == point.score:
                return point.time_s
            share = (score - before) / (point.score - before)
            return before_s + share * (point.time_s - before_s)
        before_s, before = point.time_s, point.score
    raise ValueError(f"{score} is never reached")


def _heading(task: Task, run: Run) -> str:
    clock = f"; {run.clock}" if run.clock else ""
    part = f" of the first {run.part:.0%} of the examples" if run.part < 1 else ""
    momentum = f", momentum {run.momentum:g}" if run.momentum != task.momentum else ""
    return f"{task.title}; {run.ranks} workers, {run.epochs} epochs{part}{momentum}{clock}"


def _worst(task: Task, scores: Sequence[float]) -> float:
    return max(scores) if task.lower_is_better else min(scores)


def grouped(
    trained: Sequence[Trained], key: Callable[[Run], str]
) -> Mapping[str, Sequence[Trained]]:
    """The trainings by what ``key`` says of their runs, in the order in which each comes first."""
    found: dict[str, list[Trained]] = {}
    for each in trained:
        found.setdefault(key(each.run), []).append(each)
    return found


def outcomes_by(trained: Sequence[Trained], key: Callable[[Run], str]) -> dict[str, list[Outcome]]:
    """The outcomes of `grouped` trainings."""
    return {
        name: [each.outcome for each in several] for name, several in grouped(trained, key).items()
    }
