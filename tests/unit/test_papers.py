"""experiments/papers: the studies run tiny, and say what their pages claim."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.language.training import LanguageSetting, lstm_profile
from experiments.papers import baseline, convergence, links, parallax, processors
from experiments.papers.models import ParallaxModel, language_model, translation_model
from foreprop.workload.profile import load_profile
from foreprop.workload.setting import LabSetting

TYPES = 3_000


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
    assert 0 < model.alpha < 1


def test_a_translation_model_has_the_paper_s_layers(words: torch.Tensor) -> None:
    made = translation_model(words)
    tables = [array for array in made.profile.arrays if array.alpha is not None]
    assert [table.shape for table in tables] == [(36_548, 1_024)] * 2
    assert made.sparse_elems == pytest.approx(74.9e6, rel=0.01)  # as EuroSys's Table 1 has it
    assert sum(array.shape == (4_096, 1_024) for array in made.profile.arrays) >= 9


def test_parallax_s_study_fits_one_point_and_predicts_the_others(
    model: ParallaxModel,
) -> None:
    model = replace(model, compute_s=0.2)
    testbed = parallax.Testbed(workers_per_machine=6, rate_bits_per_s=20e9)
    points = list(parallax.study({"LM": model}, testbed, [2]))
    assert [(p.system, p.local_aggregation) for p in points] == [
        ("ps", False),
        ("hybrid", False),
        ("hybrid", True),
        ("ps", True),
        ("mpi", True),
        ("p3", True),
    ]
    fitted = points[2]
    assert fitted.normalised == pytest.approx(parallax.PUBLISHED["LM"], rel=0.011)
    assert fitted.server_s_per_gb > 0
    assert points[0].throughput < points[1].throughput < fitted.throughput
    lines = [*parallax.table_1({"LM": model}, points), *parallax.table_4(points)]
    assert lines[2].startswith("| LM |")
    assert lines[-1].startswith("| LM | 1.00 (1.00) | ")


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
