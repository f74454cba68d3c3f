"""experiments/papers: the studies run tiny, and say what their pages claim."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreprop.plan.profile import Profile, ProfiledArray, load_profile
from foreprop_lab.experiments.language.training import LanguageSetting, lstm_profile
from foreprop_lab.experiments.papers import baseline, convergence, links, parallax, processors
from foreprop_lab.experiments.papers.fitting import fitted
from foreprop_lab.experiments.papers.models import ParallaxModel, language_model, translation_model
from foreprop_lab.experiments.papers.parallaxtables import (
    DENSE_PS_SLOWER,
    HOROVOD_SLOWER,
    NORMALISED,
    Point,
    merged,
    read_points,
    table_1,
    table_4,
)
from foreprop_lab.setting.labsetting import LabSetting

TYPES = 3_000
TESTBED = parallax.Testbed(workers_per_machine=6, rate_bits_per_s=20e9, scale=1)


@pytest.fixture(scope="module")
def words() -> torch.Tensor:
    """Numbers that go by frequency, as Zipf has it."""
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (torch.exp(uniform * torch.log(torch.tensor(TYPES + 1.0))) - 1).long()


@pytest.fixture(scope="module")
def model(words: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> ParallaxModel:
    text = tmp_path_factory.mktemp("text") / "words"
    text.write_text(" ".join(f"w{number}" for number in words.tolist()))
    setting = LanguageSetting(
        profile=lstm_profile(64, 32),
        systems=("hybrid",),
        nodes=3,
        width=64,
        hidden=32,
        sequences=16,
        samples=200,
        text=text,
    )
    return language_model(setting)


def test_rows_are_counted_once_for_a_machine(model: ParallaxModel) -> None:
    first, *dense, last = model.profile.arrays
    assert [first.name, last.name] == ["words.weight", "softmax.weight"]
    assert all(array.alpha is None for array in dense)
    for (name, together), table in zip(model.together, (first, last), strict=True):
        assert name == table.name
        assert table.alpha is not None
        assert table.alpha < together < 3 * table.alpha
    assert model.sparse_elems == 2 * first.rows * 64
    lists = {array.name: array.alpha for array in model.as_lists.arrays}
    rows = {"words.weight": 16 * 20, "softmax.weight": 16 * 20 + 200}
    for name, count in rows.items():
        assert lists[name] == pytest.approx(count / first.rows)
    assert lists["words.weight"] > (first.alpha or 0)  # words that occur twice
    assert 0 < model.alpha < 1


def test_a_translation_model_has_the_paper_s_layers(words: torch.Tensor) -> None:
    made = translation_model(words)
    tables = [array for array in made.profile.arrays if array.alpha is not None]
    assert [table.shape for table in tables] == [(36_548, 1_024)] * 2
    assert made.sparse_elems == pytest.approx(74.9e6, rel=0.01)  # as EuroSys's Table 1 has it
    assert sum(array.shape == (4_096, 1_024) for array in made.profile.arrays) >= 9


@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
def test_parallax_s_study_fits_two_costs_and_predicts_all_else(
    model: ParallaxModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LM's rows to 9.4 times one worker, ResNet-50's servers to 1.4 times all-reduce."""
    # with fewer and larger arrays who waits for whom decides, and the curve has teeth
    dense = Profile(
        name="dense",
        arrays=tuple(
            ProfiledArray(name=str(n), shape=(200_000,), forward_flops=1.0) for n in range(16)
        ),
    )
    images = ParallaxModel(profile=dense, compute_s=0.02, batch=64, unit="images")
    known = {"ResNet-50": images, "LM": replace(model, compute_s=0.2)}
    monkeypatch.setattr(parallax, "four_models", lambda: known)
    monkeypatch.setattr(parallax, "Testbed", lambda: TESTBED)
    points = parallax.main(str(tmp_path), machines="2", names="ResNet-50,LM")
    found = {(p.model, p.system, p.local_aggregation): p for p in points}
    assert len(found) == len(points) == 4 + 7
    fitted = found["LM", "hybrid", True]
    assert fitted.normalised == pytest.approx(NORMALISED["LM"], rel=0.011)
    assert fitted.row_s_per_gb > 0
    servers, reduced = (found["ResNet-50", s, s != "ps"] for s in ("ps", "mpi"))
    assert servers.step_s == pytest.approx(DENSE_PS_SLOWER * reduced.step_s, rel=0.011)
    gathered, lists = (found["LM", s, True] for s in ("mpi", "horovod"))
    assert lists.gathered_s_per_gb > 0 == gathered.gathered_s_per_gb
    assert lists.step_s == pytest.approx(HOROVOD_SLOWER * fitted.step_s, rel=0.011)
    assert gathered.step_s < fitted.step_s  # not in the paper: what a processor does is missing
    apart = found["LM", "hybrid", False]
    assert found["LM", "ps", False].throughput < apart.throughput < fitted.throughput
    again = parallax.main(str(tmp_path), machines="3", names="ResNet-50", costs="0.5,5,2")
    assert len(again) == len(points) + 4  # added to the file
    with pytest.raises(ValueError, match=r"horovod is fitted to LM: name it, too, or give three"):
        parallax.gathered_costs(TESTBED, model, [p for p in points if p.model != "LM"])
    assert read_points(tmp_path / "parallax.json") == again
    for name in ("throughput", "scaling"):
        assert (tmp_path / f"parallax-{name}.png").stat().st_size > 10_000


def test_parallax_s_tables_have_what_was_published_beside() -> None:
    def point(system: str, relays: bool, words_per_s: float) -> Point:
        return Point(
            model="LM",
            system=system,
            local_aggregation=relays,
            machines=8,
            workers=48,
            dense_s_per_gb=0.5,
            row_s_per_gb=5.0,
            step_s=1.0,
            throughput=words_per_s,
            unit="words",
            normalised=1.0,
        )

    points = [point("ps", False, 1e5), point("hybrid", False, 1.2e5), point("hybrid", True, 3e5)]
    rows = list(table_1({"LM": (9_400_000, 78_500_000, 0.14)}, points))
    assert rows[2] == "| LM | 9.4 M | 78.5 M | 0.14 | 100,000 words/s |  |  | 300,000 words/s |  |"
    assert list(table_4(points))[2] == "| LM | 1.00 (1.00) | 1.20 (1.11) | 3.00 (2.49) |"
    better = point("ps", False, 2e5)
    assert merged(points, [better]) == [*points[1:], better]


def test_a_cost_that_no_step_shows_is_an_error() -> None:
    assert fitted(lambda cost: 3 + 2 * cost, 9.0, first=(1.0, 5.0), within=1e-6) == 3.0
    with pytest.raises(ValueError, match=r"a step of 2 s is not found: 2 gives 1 s"):
        fitted(lambda _: 1.0, 2.0, first=(1.0, 2.0), within=0.01)


def test_a_server_s_processor_has_the_published_peaks() -> None:
    """Fitted to 1PS's; 2PS's most follows from the largest array's share, three quarters."""
    assert processors.largest_share(256, 2) == pytest.approx(0.745, abs=0.001)
    points = list(processors.peaks(workers=(3, 5), cases=[(256, 0.001)]))
    found = {(p.system, p.workers): p.images_per_s for p in points}
    for system in ("1ps", "2ps"):
        at, images_per_s = processors.PUBLISHED[system]
        assert found[system, at] == pytest.approx(images_per_s, rel=0.05)
    assert found["1ps", 3] == pytest.approx(found["1ps", 5], rel=0.1)  # flat, no peak
    assert len(list(processors.summary(points))) == 5


def test_peaks_take_a_cost_of_every_pair_of_a_server_s_connections() -> None:
    """One coefficient, 75 us, puts 1PS's most images/s at five workers and 2PS's at three."""
    counted, hidden, compute_s, pair_s = processors.CONTENDED[0]
    assert counted == processors.OF_A_SERVER
    assert processors.pairs_of(counted, 2, 3) == 6
    assert processors.pairs_of(processors.OF_ALL, 2, 3) == 30
    counts = (2, 3, 4, 5, 6)
    points = list(processors.contended(counted, hidden, compute_s, pair_s, counts))
    for system in ("1ps", "2ps"):
        found = {p.workers: p.images_per_s for p in points if p.system == system}
        at, images_per_s = processors.PUBLISHED[system]
        assert max(found, key=found.__getitem__) == at, found
        assert found[at] == pytest.approx(images_per_s, rel=0.04)
    free = processors.contended(counted, hidden, compute_s, 0.0, (2, 3, 4))
    flat = [p.images_per_s for p in free if p.system == "2ps"]
    assert flat == sorted(flat)  # no peak without it
    assert len(list(processors.contended_summary(points))) == 5


def test_another_compute_has_its_peaks_elsewhere() -> None:
    """With 1 ms a batch, pairs of all connections: 2PS is fastest with two workers, not three."""
    points = list(processors.tried(workers=(2, 3, 5), compute_s=(0.001,)))
    assert len(points) == 2 * 2 * 2 * 3
    for study in {point.study for point in points}:
        found = {p.workers: p.images_per_s for p in points if (p.study, p.system) == (study, "2ps")}
        if study.startswith(processors.OF_ALL):
            assert max(found, key=found.__getitem__) == 2, found
    _, _, *rows = processors.tried_summary(points)
    assert len(rows) == 4
    assert rows[0].startswith("| pairs of a server's, 1/27 | 1 ms | ")


def test_computing_more_helps_where_links_are_congested() -> None:
    points = list(processors.trade_offs(workers=(4,)))
    batches = [p.images_per_s for p in points if p.study == "batches"]
    assert batches == sorted(batches)
    codecs = {p.codec: p.images_per_s for p in points if p.study == "codecs"}
    assert codecs["int8"] > 1.5 * codecs[None]


def test_baselines_of_2018_make_slices_worth_more() -> None:
    """The largest array on one server, and processors that serve it: not our `kvstore` alone."""
    free = baseline.speeds(30, 0.0, scale=256)
    assert free.gain("slicing", "kvstore") == pytest.approx(1.0, abs=0.05)
    assert free.gain("slicing", baseline.WHOLE) > 1.3


def test_a_watched_link_is_idle_for_longer_with_kvstore() -> None:
    setting = LabSetting(
        profile=load_profile("sockeye"),
        systems=("kvstore", "p3"),
        scale=64,
        compute_s=0.5,
        iterations=3,
        sample_network=True,
    )
    kvstore, p3 = links.utilisation([setting])
    assert (kvstore.system, p3.system) == ("kvstore", "p3")
    assert sum(links.idle_shares(p3)) < sum(links.idle_shares(kvstore))
    for panel in (kvstore, p3):
        assert max(panel.sent_share) < 2.1  # 10 ms and a bucket's burst
        carried = sum(panel.sent_share) / len(panel.sent_share)
        assert 0.4 < carried < 1.05
    ((asked, records),) = list(links.by_nodes([setting]))
    assert asked is setting
    assert [record.network for record in records] == ["simulated"] * 2


@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
def test_perplexity_goes_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: torch.Tensor
) -> None:
    course = {convergence.COURSE: [[0, 900.0], [50, 300.0], [100, 200.0]]}
    (tmp_path / "convergence.json").write_text(json.dumps(course))
    types = [str(number) for number in range(TYPES)]
    monkeypatch.setattr(convergence, "wikitext2", lambda: (words, types))
    steps_s = convergence.main(str(tmp_path))
    assert min(steps_s, key=steps_s.__getitem__) == "hybrid"
    assert steps_s["ring"] > steps_s["ddp-sparse"]
    drawn = json.loads((tmp_path / "convergence-time.json").read_text())
    assert drawn["ring"] == [[50 * steps_s["ring"], 300.0], [100 * steps_s["ring"], 200.0]]
    assert (tmp_path / "convergence-time.png").exists()
