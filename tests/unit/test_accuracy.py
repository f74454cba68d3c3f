"""experiments/accuracy: what is trained when nothing is lost, what is offered, what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from experiments.accuracy import steptimes, studies
from experiments.accuracy.apart import train_apart
from experiments.accuracy.comparison import chart_of, lines_of, offered, time_to
from experiments.accuracy.steptimes import Clock, apart_step_s, synchronous_step_s
from experiments.accuracy.studies import ASGD, CODECS, DGC, NAMES, Trained, keep, kept, runs_of
from experiments.accuracy.tasks import (
    TASKS,
    Examples,
    LanguageNet,
    ResNet,
    Task,
    load_part,
)
from experiments.accuracy.training import EXACT, Outcome, Point, order_of, scored_steps, train
from experiments.chart import write_chart
from foreprop.errors import ConfigError

RANKS, STEPS = 2, 3


@pytest.fixture(scope="module")
def task() -> Task:
    """Fashion-MNIST's, with few examples that can be learnt."""
    original = TASKS["fashion"]
    generator = torch.Generator().manual_seed(0)
    elems = RANKS * original.batch * STEPS
    labels = torch.randint(10, (elems,), generator=generator)
    images = torch.randn((elems, 784), generator=generator) + labels[:, None] / 5
    examples: Examples = (images, labels)
    return replace(original, load=lambda: (examples, examples), epochs=1)


def test_exact_is_plain_momentum_sgd_of_the_ranks_mean(task: Task) -> None:
    data, _ = task.load()
    torch.manual_seed(4)
    model = task.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for batches in order_of(task, len(data[1]), 4, RANKS):
        optimizer.zero_grad()
        for chosen in batches:
            loss = cross_entropy(model(data[0][chosen]), data[1][chosen]) / RANKS
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    expected = task.score(model, data)
    assert train(task, EXACT, 4).score == pytest.approx(expected, abs=0.5)
    assert train(task, "bf16", 4).score == pytest.approx(expected, abs=3)


@pytest.mark.parametrize("name", NAMES)
def test_every_codec_trains(name: str, task: Task) -> None:
    outcome = train(task, name, 0)
    assert outcome == train(task, name, 0)
    assert outcome.push_bytes_per_elem <= 2
    assert outcome.reply_bytes_per_elem <= 4


def test_without_staleness_workers_apart_train_as_synchronous_ones(task: Task) -> None:
    """With steps of different lengths, too: all wait for all."""
    step_s = [[1.0], [1.5]]
    given = {"strength": 0.5, "scores": 3}
    outcome = train_apart(task, 4, staleness=0, step_s=step_s, **given)  # type: ignore[arg-type]
    synchronous = train(task, EXACT, 4, scores=3, step_s=1.5)
    for one, other in zip(outcome.course, synchronous.course, strict=True):
        assert (one.epoch, one.time_s) == (other.epoch, other.time_s)
        assert one.score == pytest.approx(other.score, abs=0.5)


def test_workers_apart_wait_for_nobody_and_read_old_values(task: Task) -> None:
    """As many gradients as synchronous workers; the fast one computes more of them."""
    step_s = [[1.0], [2.0]]
    apart = train_apart(task, 4, staleness="async", strength=0, step_s=step_s)
    assert apart.course[-1].time_s == 4.0  # 4 and 2 steps, where synchronous ones take 6 s
    assert apart == train_apart(task, 4, staleness="async", strength=0, step_s=step_s)
    other = train_apart(task, 4, staleness="async", strength=5, step_s=step_s)
    assert other.course[-1].time_s == 4.0
    bounded = train_apart(task, 4, staleness=1, strength=0, step_s=[[1.0], [10.0]])
    assert bounded.course[-1].time_s > 4.0


def test_scores_are_at_equal_distances() -> None:
    assert scored_steps(12, 3) == {4, 8, 12}
    assert scored_steps(2, 6) == {0, 1, 2}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steptimes, "_STEPS", 4)
    monkeypatch.setattr(steptimes, "_UNCOUNTED", 1)


@pytest.mark.usefixtures("few_steps")
def test_steps_take_as_long_as_the_simulator_says() -> None:
    clock = Clock(nodes=2, rate_bits_per_s=5e8, compute_s=0.1, step_jitter=0.0)
    exact = synchronous_step_s(clock, "p3", None)
    assert 0.1 <= synchronous_step_s(clock, "p3", "dgc:0.001") < exact < 0.2
    apart = apart_step_s(clock, "p3")
    assert len(apart) == 2
    assert all(0.1 <= step <= 2 * exact for steps in apart for step in steps)


@pytest.mark.parametrize(
    ("name", "build", "shape", "classes"),
    [("cifar", lambda: ResNet(1), (3, 32, 32), 10), ("wikitext", LanguageNet, (35,), 10_000)],
)
def test_the_other_models_learn(
    name: str, build: type[torch.nn.Module], shape: tuple[int, ...], classes: int
) -> None:
    task = TASKS[name]
    torch.manual_seed(0)
    model = build()
    words = len(shape) == 1
    inputs = torch.randint(10, (4, *shape)) if words else torch.randn(4, *shape)
    targets = inputs.roll(-1, 1) if words else torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = task.loss(model, (inputs, targets))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    score = task.score(model, (inputs, targets))
    assert 1 <= score <= (classes if words else 100)


def test_six_n_and_two_layers() -> None:
    """He et al. 2016, section 4.2 and table 6: ResNet-20 has 0.27 million parameters."""
    model = ResNet(3)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) + 1 == 20
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.27e6, rel=0.01)


def test_a_codec_is_offered_if_it_is_within_a_deviation_of_exact() -> None:
    exact = [87.0, 88.0, 89.0]  # a deviation of 1
    assert offered(exact, exact, lower_is_better=False)
    assert offered([90.0, 90.0, 95.0], exact, lower_is_better=False)
    assert offered([87.1, 87.1, 87.1], exact, lower_is_better=False)
    assert not offered([86.9, 86.9, 86.9], exact, lower_is_better=False)
    assert offered([86.9, 86.9, 86.9], exact, lower_is_better=True)
    assert not offered([90.0, 90.0, 95.0], exact, lower_is_better=True)


def test_the_time_to_a_score_lies_between_two_points() -> None:
    course = [Point(1, 10, 50), Point(2, 20, 70), Point(3, 30, 65), Point(4, 40, 80)]
    accuracy = TASKS["cifar"]
    assert time_to(accuracy, Outcome(course), 40) == 10
    assert time_to(accuracy, Outcome(course), 60) == 15
    assert time_to(accuracy, Outcome(course), 75) == pytest.approx(30 + 10 * 10 / 15)
    falling = [Point(1, 10, 400), Point(2, 20, 300)]
    assert time_to(TASKS["wikitext"], Outcome(falling), 350) == 15


@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
@pytest.mark.parametrize("study", [CODECS, DGC, ASGD])
def test_a_study_trains_once_and_goes_on(
    study: str, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "TASKS", {"cifar": task})
    names = ["int8"]
    clock = Clock(nodes=2)
    runs = runs_of(study, "cifar", epochs=None, names=names, clock=clock)
    counted: list[studies.Run] = []

    def outcome_of(run: studies.Run) -> Outcome:
        counted.append(run)
        scores = [50.0 + len(counted), 80.0 + run.seed + len(run.codec)]
        return Outcome([Point(n + 1, 10 * (n + 1), score) for n, score in enumerate(scores)])

    monkeypatch.setattr(studies, "outcome_of", outcome_of)
    out = tmp_path / "trainings.json"
    first = studies.train_all(runs[:2], out)
    trained = studies.train_all(runs, out)
    assert trained[:2] == first
    assert counted == runs
    assert studies.train_all(runs, out) == trained == kept(out)
    lines = [*lines_of(study, trained)]
    assert len(lines) > 4
    assert len({line.count("|") for line in lines[2:]}) == 1
    if study != CODECS:
        write_chart(tmp_path, "chart", chart_of(study, trained), b"")
        assert (tmp_path / "chart.png").stat().st_size > 10_000


@pytest.mark.usefixtures("few_steps")
def test_outcomes_follow_from_runs(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of `outcome_of`, with few examples."""
    monkeypatch.setattr(studies, "TASKS", {"cifar": task})
    clock = Clock(nodes=2, step_jitter=0.2)
    runs = runs_of(ASGD, "cifar", epochs=1, names=[], clock=clock)
    courses = [studies.outcome_of(run).course for run in runs]
    assert [run.label for run in runs] == ["p3", "SSP, s = 3", "ASGD", "DC-ASGD"]
    assert all(course[-1].epoch == 1 for course in courses)
    assert courses[2][-1].time_s == pytest.approx(courses[0][-1].time_s, rel=0.3)
    plain = runs_of(CODECS, "cifar", epochs=1, names=[], clock=clock)[0]
    assert studies.outcome_of(plain).course == train(task, EXACT, 0).course


def test_a_part_of_the_data_is_its_first_examples(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole, labels), test = task.load()
    (inputs, targets), tested = load_part(task, 0.5, least=200)
    assert torch.equal(inputs, whole[:300])
    assert torch.equal(targets, labels[:300])
    assert tested is test
    says = r"part is 0.1: 60 of 600 examples; a step has 200, so at least 0.3334"
    with pytest.raises(ConfigError, match=says):
        load_part(task, 0.1, least=200)
    monkeypatch.setattr(studies, "TASKS", {"fashion": task})
    run = runs_of(CODECS, "fashion", epochs=1, names=[], clock=Clock(), part=0.5)[0]
    shortened = replace(task, load=lambda: ((inputs, targets), test))
    assert studies.outcome_of(run) == train(shortened, EXACT, 0)
    heading = next(lines_of(CODECS, [Trained(run=run, outcome=studies.outcome_of(run))] * 2))
    assert "1 epochs of the first 50% of the examples" in heading


def test_what_is_no_file_of_trainings_is_told(tmp_path: Path) -> None:
    out = tmp_path / "trainings.json"
    assert kept(out) == []
    out.write_text("[1]")
    with pytest.raises(ConfigError, match=r"trainings\.json is no file"):
        kept(out)
    run = runs_of(CODECS, "fashion", epochs=1, names=[], clock=Clock())[0]
    keep(out, [Trained(run=run, outcome=Outcome([Point(1, 0, 80)]))])
    assert kept(out)[0].run == run
