"""experiments/accuracy: what is trained when nothing is lost, what is offered, what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy

from foreprop.core.codecfacts import AUTO_CODECS
from foreprop.errors import ConfigError
from foreprop_lab.experiments.accuracy import steptimes, studies
from foreprop_lab.experiments.accuracy.comparison import (
    lines_of,
    mean_course,
    mean_loss,
    offered,
    time_lines,
    time_to,
    verdicts,
)
from foreprop_lab.experiments.accuracy.scorecharts import FILES, chart_of, decode, score_at
from foreprop_lab.experiments.accuracy.stale import train_stale
from foreprop_lab.experiments.accuracy.steptimes import Clock, stale_step_s, synchronous_step_s
from foreprop_lab.experiments.accuracy.studies import (
    ASGD,
    CODECS,
    DGC,
    NAMES,
    Trained,
    keep,
    kept,
    runs_of,
)
from foreprop_lab.experiments.accuracy.tasks import (
    MOST_PERPLEXITY,
    TASKS,
    Examples,
    LanguageNet,
    ResNet,
    Task,
    load_part,
    perplexity,
)
from foreprop_lab.experiments.accuracy.timed import steps_of, timed
from foreprop_lab.experiments.accuracy.training import (
    EXACT,
    Outcome,
    Point,
    order_of,
    scored_steps,
    train,
)
from foreprop_lab.experiments.chart import write_chart

RESULTS = Path(__file__).parents[1] / "docs" / "results"
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


def test_without_staleness_workers_train_as_synchronous_ones(task: Task) -> None:
    """With steps of different lengths, too: all wait for all."""
    step_s = [[1.0], [1.5]]
    given = {"strength": 0.5, "scores": 3}
    outcome = train_stale(task, 4, staleness=0, step_s=step_s, **given)  # type: ignore[arg-type]
    synchronous = train(task, EXACT, 4, scores=3, step_s=1.5)
    for one, other in zip(outcome.course, synchronous.course, strict=True):
        assert (one.epoch, one.time_s) == (other.epoch, other.time_s)
        assert one.score == pytest.approx(other.score, abs=0.5)


def test_asynchronous_workers_do_not_wait_and_read_old_values(task: Task) -> None:
    """As many gradients as synchronous workers; the fast one computes more of them."""
    step_s = [[1.0], [2.0]]
    apart = train_stale(task, 4, staleness="async", strength=0, step_s=step_s)
    assert apart.course[-1].time_s == 4.0  # 4 and 2 steps, where synchronous ones take 6 s
    assert apart == train_stale(task, 4, staleness="async", strength=0, step_s=step_s)
    other = train_stale(task, 4, staleness="async", strength=5, step_s=step_s)
    assert other.course[-1].time_s == 4.0
    bounded = train_stale(task, 4, staleness=1, strength=0, step_s=[[1.0], [10.0]])
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
    apart = stale_step_s(clock, "p3")
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


@pytest.mark.usefixtures("few_steps")
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
    if study == CODECS:
        trained = timed(trained, clock)
        assert len({line.count("|") for line in [*time_lines(trained)][2:]}) == 1
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
    assert studies.outcome_of(plain) == train(task, EXACT, 0, scores=4)
    other = msgspec.structs.replace(plain, seed=1)
    assert studies.outcome_of(other) == train(task, EXACT, 1)


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
    assert studies.outcome_of(run) == train(shortened, EXACT, 0, scores=4)
    heading = next(lines_of(CODECS, [Trained(run=run, outcome=studies.outcome_of(run))] * 2))
    assert "1 epochs of the first 50% of the examples" in heading


def test_a_file_that_has_no_trainings_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "trainings.json"
    assert kept(out) == []
    out.write_text("[1]")
    with pytest.raises(ConfigError, match=r"trainings\.json is no file"):
        kept(out)
    run = runs_of(CODECS, "fashion", epochs=1, names=[], clock=Clock())[0]
    keep(out, [Trained(run=run, outcome=Outcome([Point(1, 0, 80)]))])
    assert kept(out)[0].run == run


@pytest.mark.usefixtures("few_steps")
def test_a_codecs_training_takes_as_many_steps_as_it_has(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the nodes that were trained, with the times of the task's own model."""
    monkeypatch.setattr(studies, "TASKS", {"fashion": task})
    runs = runs_of(CODECS, "fashion", epochs=2, names=["int4"], clock=Clock(), seeds=1)
    assert [steps_of(run) for run in runs] == [2 * STEPS] * 2
    course = [Point(1, 0, 70), Point(2, 0, 80)]
    clock = Clock(rate_bits_per_s=1e7, step_jitter=0.0)
    exact, int4 = timed([Trained(run=run, outcome=Outcome(course)) for run in runs], clock)
    own = exact.run.clock
    assert own is not None
    assert (own.profile, own.nodes, own.rate_bits_per_s) == ("perceptron", RANKS, 1e7)
    step_s = synchronous_step_s(own, "p3", None)
    assert step_s > 4 * 118_272 / 1.25e6 > 0.1  # half of the bytes each way, pushes and replies
    assert exact.outcome.course == [
        Point(1, pytest.approx(STEPS * step_s), 70),
        Point(2, pytest.approx(2 * STEPS * step_s), 80),
    ]
    assert 0.1 < int4.outcome.course[-1].time_s / (2 * STEPS) < 0.5 * step_s


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", ["language_net", "perceptron"])
def test_models_trained_here_have_steps_of_their_own(name: str) -> None:
    clock = Clock(profile=name, nodes=2, step_jitter=0.0)
    fast = synchronous_step_s(clock, "p3", None)
    assert 0.1 <= fast < 0.2
    model = LanguageNet() if name == "language_net" else TASKS["fashion"].build()
    elems = sum(p.numel() for p in model.parameters())
    slow = msgspec.structs.replace(clock, rate_bits_per_s=1e6)
    least_s = 8 * 4 * elems / 1e6
    found_s = synchronous_step_s(slow, "p3", None)
    assert least_s <= found_s <= 1.2 * least_s + 0.1  # three slices are not dealt evenly


def test_seeds_and_momentum_are_those_of_the_options() -> None:
    for study, each in ((CODECS, 2), (DGC, 10), (ASGD, 4)):
        runs = runs_of(study, "cifar", epochs=1, names=["int8"], clock=Clock(), seeds=2)
        assert [run.seed for run in runs] == [0] * each + [1] * each
        assert len(set(runs)) == 2 * each
    less = runs_of(ASGD, "cifar", epochs=1, names=[], clock=Clock(), momentum=0.6)
    assert {run.momentum for run in less} == {0.6}
    assert "momentum 0.6" in next(
        lines_of(ASGD, [Trained(run=run, outcome=Outcome([Point(1, 9, 60)])) for run in less])
    )
    for wrong in (1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"momentum is {wrong}; it must be"):
            runs_of(ASGD, "cifar", epochs=1, names=[], clock=Clock(), momentum=wrong)


def test_several_seeds_have_a_mean_course() -> None:
    one = Outcome([Point(1, 10, 50), Point(2, 20, 60)])
    other = Outcome([Point(1, 12, 54), Point(2, 24, 70)])
    assert mean_course([one, other]).course == [Point(1, 11, 52), Point(2, 22, 65)]
    runs = runs_of(ASGD, "cifar", epochs=2, names=[], clock=Clock(), seeds=2)
    trained = [Trained(run=run, outcome=(one, other)[run.seed]) for run in runs]
    assert "| p3 | 65.00 | 60.00 to 70.00 | 22.0 | 22.0 | 1.00 |" in [*lines_of(ASGD, trained)]


def test_what_has_ended_keeps_its_score() -> None:
    outcome = Outcome([Point(1, 10, 50), Point(2, 20, 60)])
    assert [score_at(outcome, at_s) for at_s in (5, 10, 15, 20, 99)] == [50, 50, 55, 60, 60]


def test_dgcs_mean_loss_is_of_the_last_scores() -> None:
    runs = runs_of(DGC, "cifar", epochs=1, names=[], clock=Clock())
    scores = {EXACT: 60.0, "dgc:0.001": 57.0}
    trained = [
        Trained(run=run, outcome=Outcome([Point(1, 9, 90), Point(2, 18, scores[run.codec])]))
        for run in runs
    ]
    assert mean_loss(trained) == 3
    assert [*lines_of(DGC, trained)][-1] == "| mean; the paper's -0.4 | | | -3.00 |"


def test_a_model_that_diverged_has_the_highest_perplexity() -> None:
    words = torch.zeros(2, 35, dtype=torch.int64)
    for weight in (1e4, float("nan")):
        model = LanguageNet(8)
        model.bias.data[1] = weight
        assert perplexity(model, (words, words)) == MOST_PERPLEXITY


def test_auto_offers_what_passes_on_every_task() -> None:
    """lab/docs/codecs.md's tables, from the trainings that lie beside them."""
    found = verdicts(kept(RESULTS / "accuracy-trainings.json"))
    for name in AUTO_CODECS:
        assert all(found.get(name, {}).values()), name
    assert found["int8"] == found["int4"] == dict.fromkeys(TASKS, True)
    for name in ("int2", "terngrad", "1bit", "dgc:0.001"):
        assert not all(found[name].values()), name


@pytest.mark.parametrize("name", sorted(FILES))
def test_charts_of_results_are_of_the_trainings_that_are_kept(name: str) -> None:
    """Their scores, to the bit; times may be of another clock."""
    scores = {
        msgspec.structs.replace(each.run, clock=None): each.outcome.score
        for each in kept(RESULTS / "accuracy-trainings.json")
    }
    drawn = decode((RESULTS / f"{name}.json").read_bytes())
    assert drawn
    for each in drawn:
        assert scores[msgspec.structs.replace(each.run, clock=None)] == each.outcome.score
