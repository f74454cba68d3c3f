"""Real layers in the lab, tiny: eager, compiled by blocks and whole, in real namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreprop.tools.cli.app import app
from foreprop_lab.experiments import trainers
from foreprop_lab.experiments.layers.training import BLOCKS, EAGER, LAYERS_SYSTEMS
from foreprop_lab.setting.records import read_records

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.alone, pytest.mark.lab]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("model", "systems"),
    # the whole ResNet is compiled by lab/tests/test_lab_layers_models.py, in less time
    [("transformer", LAYERS_SYSTEMS), ("resnet", (EAGER, BLOCKS))],
    ids=["transformer", "resnet"],
)
def test_measures_eager_and_compiled_steps(
    model: str, systems: tuple[str, ...], tmp_path: Path
) -> None:
    asked = "--nodes 2 --compute 300ms --steps 2 --balance 0.5 --scale 1"
    arguments = ["lab", "layers", "--model", model, *asked.split(), "--out", str(tmp_path)]
    if systems != LAYERS_SYSTEMS:  # which are what is measured by default
        arguments += ["--systems", ",".join(systems)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    records = read_records(tmp_path / "results.json")
    assert tuple(record.system for record in records) == systems
    for record in records:
        assert (record.model, record.nodes, record.iterations) == (model, 2, 2)
        assert record.compute_s == pytest.approx(0.3)
        assert record.balance == pytest.approx(0.5)
        assert 0.2 < record.efficiency <= 1.05
        assert record.slice_elems == 12_500  # what a session cuts for such slow links


def test_codecs_of_real_layers(tmp_path: Path) -> None:
    asked = "--nodes 2 --compute 200ms --steps 1 --balance 1 --systems eager+lossless"
    arguments = ["lab", "layers", "--model", "lstm", *asked.split(), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (record,) = read_records(tmp_path / "results.json")
    exact_bytes = 2 * record.wire_s * record.rate_bits_per_s / 8  # of 2 nodes' pushes and answers
    assert isinstance(record.counted_bytes, int)
    assert 0.3 < record.counted_bytes / exact_bytes < 0.9
    assert "of the bytes in lossless:0." in done.output


@pytest.mark.timeout(500)
def test_trainers_are_measured_beside_plain_loops(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    records = trainers.main(2, 2, 0.1)
    names = [record.system for record in records]
    assert set(names) in ({*trainers.LOOPS}, {*trainers.TrainersSetting.paced_systems})
    shown = capsys.readouterr().out
    for record in records:
        assert record.iteration_s.median > 0.1
        assert f"\n{record.system} " in shown
