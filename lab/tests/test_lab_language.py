"""The lab's language model: each system trains it, and the sparse ones send the rows alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foreprop.errors import ConfigError
from foreprop_lab.experiments.language.ablation import ABLATION
from foreprop_lab.experiments.language.records import with_bytes
from foreprop_lab.experiments.language.training import (
    DDP_DENSE,
    DDP_SPARSE,
    FEW_SERVERS,
    HYBRID,
    RING,
    SERVERS,
    LanguageSetting,
    Text,
    build_system,
    lstm_profile,
)
from foreprop_lab.lab.run import run_lab, sampled_steps

SYSTEMS = (HYBRID, FEW_SERVERS, RING, DDP_SPARSE, DDP_DENSE)
TYPES = 3000


def setting_of(folder: Path, **changes: object) -> LanguageSetting:
    text = folder / "text"
    drawn = torch.randint(TYPES, (4000,), generator=torch.Generator().manual_seed(0))
    words = [*range(TYPES), *drawn.tolist()]
    text.write_text(" ".join(f"word{number}" for number in words))
    given = {
        "profile": lstm_profile(64, 64),
        "systems": SYSTEMS,
        "nodes": 2,
        "scale": 2,
        "compute_s": 0.1,
        "rate_bits_per_s": 100e6,
        "iterations": 3,
        "warm_up": 1,
        "sample_network": True,
        "width": 64,
        "hidden": 64,
        "sequences": 4,
        "length": 10,
        "samples": 20,
        "text": text,
    }
    return LanguageSetting(**(given | changes))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.process
@pytest.mark.lab
@pytest.mark.timeout(180)
def test_every_system_trains_it(tmp_path: Path) -> None:
    setting = setting_of(tmp_path)
    result = run_lab(setting, build=build_system)
    if result.notices:
        pytest.skip(result.notices[0])
    entries = {
        entry.record.system: entry
        for entry in with_bytes(result, sampled_steps=sampled_steps(setting))
    }
    assert tuple(entries) == SYSTEMS
    tables_bytes = 2 * TYPES * setting.row_elems * 4
    for name in (RING, DDP_DENSE):  # 2 (N - 1) / N of them, with N = 2
        assert entries[name].sent_bytes > tables_bytes
    dense = {entries[name].sent_bytes for name in (RING, DDP_DENSE)}
    for name in (HYBRID, DDP_SPARSE):
        assert 0 < entries[name].sent_bytes < min(dense) / 3
        assert 0 < entries[name].received_bytes < min(dense) / 3
    assert all(entry.record.iteration_s.median >= 0.09 for entry in entries.values())


@pytest.mark.long
@pytest.mark.process
@pytest.mark.lab
@pytest.mark.timeout(180)
def test_several_workers_per_node_merge_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers look up some of the same rows, so a node sends less than two workers would."""
    sent = {}
    for aggregated in ("auto", "off"):
        monkeypatch.setenv("FOREPROP_LOCAL_AGGREGATION", aggregated)
        systems = (SERVERS, FEW_SERVERS, HYBRID)
        setting = setting_of(tmp_path, systems=systems, workers_per_node=2, samples=400)
        result = run_lab(setting, build=build_system)
        if result.notices:
            pytest.skip(result.notices[0])
        for entry in with_bytes(result, sampled_steps=sampled_steps(setting)):
            assert entry.record.local_aggregation == aggregated
            sent[entry.record.system, aggregated] = entry.sent_bytes
    for name in (SERVERS, FEW_SERVERS):
        assert 0 < sent[name, "auto"] < 0.75 * sent[name, "off"]
    assert 0 < sent[HYBRID, "auto"] < sent[HYBRID, "off"]  # the ring's part is the same


@pytest.mark.long
@pytest.mark.process
@pytest.mark.lab
@pytest.mark.timeout(180)
def test_each_technique_of_parallax_saves_its_bytes(tmp_path: Path) -> None:
    systems = tuple(ABLATION)
    setting = setting_of(tmp_path, systems=systems, workers_per_node=2, samples=400)
    result = run_lab(setting, build=build_system)
    if result.notices:
        pytest.skip(result.notices[0])
    entries = {
        entry.record.system: entry
        for entry in with_bytes(result, sampled_steps=sampled_steps(setting))
    }
    assert tuple(entries) == systems
    sent = [entries[name].sent_bytes for name in systems]
    received = [entries[name].received_bytes for name in systems]
    assert sent[2] < sent[1]  # the node's rows are merged
    assert received[3] < 0.9 * received[2]  # no rows are fetched only for the norm
    assert sent[4] < 0.7 * sent[3]
    assert received[4] < 0.7 * received[3]


def test_batches_are_the_text(tmp_path: Path) -> None:
    setting = setting_of(tmp_path)
    shares = [Text(setting, node) for node in range(2)]
    assert [share.types for share in shares] == [TYPES, TYPES]
    firsts = [next(share.batches()) for share in shares]
    for words, classes in firsts:
        assert words.shape == (4, 10)
        assert torch.equal(classes[:39], words.reshape(-1)[1:])
        assert len(classes) == 40 + 20
        assert int(classes.min()) >= 0
        assert int(classes.max()) < TYPES
    assert not torch.equal(firsts[0][0], firsts[1][0])


def test_frequent_words_are_drawn_more_often(tmp_path: Path) -> None:
    """Log-uniform: the share of numbers below n is log(n + 1) / log(types + 1)."""
    _, classes = next(Text(setting_of(tmp_path, samples=20_000), 0).batches())
    share = (classes[40:] < 100).double().mean()
    assert float(share) == pytest.approx(0.576, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"nodes": 64, "sequences": 16}, "which has 7000 words; a batch for each of 64 workers"),
        ({"text": Path("nowhere")}, "text is nowhere, which cannot be read"),
        ({"width": 0}, "width is 0; at least 1"),
        ({"systems": ("p3",)}, "systems has 'p3'; there are hybrid, p2p"),
    ],
)
def test_what_cannot_be(tmp_path: Path, changes: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Text(setting_of(tmp_path, **changes), 0)
