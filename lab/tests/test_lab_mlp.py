"""The perceptron of the comparison paper's experiment: its numbers, its times, predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.tools.cli.app import app
from foreprop.tools.compare.result import Spread
from foreprop_lab.experiments.mlp import run as mlprun
from foreprop_lab.experiments.mlp import training as mlp
from foreprop_lab.experiments.mlp.run import Epochs, MlpRecord, errors_of, predict_epochs, symbols
from foreprop_lab.experiments.mlp.training import MLP_SYSTEMS, Images, Mlp, MlpSetting, mlp_profile


def record(system: str, workers: int, epoch_s: float, **changes: Any) -> MlpRecord:
    setting = MlpSetting(workers=workers)
    step_s = epoch_s / setting.epoch_steps
    fields: dict[str, Any] = {
        "system": system,
        "preset": "tensorflow",
        "workers": workers,
        "servers": mlp.SERVERS.get(system, 0),
        "batch": 100,
        "hidden": 256,
        "model_bytes": limit.model_bytes(setting.layers),
        "rate_bits_per_s": 100e6,
        "compute_s": 0.3,
        "step_s": Spread(median=step_s, p10=0.9 * step_s, p90=1.2 * step_s),
        "waiting_s": step_s - 0.3,
        "epoch_s": epoch_s,
        "images_per_s": 60_000 / epoch_s,
        "predicted_epoch_s": Epochs(published=None, published_in_batches=1.1 * epoch_s, refined=90),
        "limited_by": "wire",
        "steps": 10,
        "loss_first": 2.0,
        "loss_last": 1.0,
        "cpu_share": 0.2,
        "cpu_bound": False,
    }
    return MlpRecord(**(fields | changes))


def test_the_model_has_two_hidden_layers() -> None:
    sizes = [size for layer in MlpSetting(workers=2).layers for size in layer.sizes_elems]
    assert sizes == [784 * 256, 256, 256 * 256, 256, 256 * 10, 10]
    assert [a.shape for a in mlp_profile(8).arrays] == [
        (8, 784),
        (8,),
        (8, 8),
        (8,),
        (10, 8),
        (10,),
    ]
    model = Mlp(MlpSetting(workers=1))
    assert [p.numel() for p in model.parameters()] == sizes


def test_its_gradients_are_those_of_ordinary_layers() -> None:
    setting = MlpSetting(workers=1, hidden=8, compute_s=1e-3)
    ours = Mlp(setting)
    plain = nn.Sequential(
        nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10)
    )
    plain.load_state_dict(
        {f"{2 * (int(k[2]) - 1)}{k[3:]}": v for k, v in ours.state_dict().items()}
    )
    x, labels = torch.randn(5, 784), torch.arange(5)
    for model in (ours, plain):
        nn.functional.cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_step_takes_the_time_that_it_is_given() -> None:
    setting = MlpSetting(workers=1, hidden=8, compute_s=0.05)
    model = Mlp(setting)
    model.clock.restart()
    started = model.clock.free_at
    model(torch.randn(2, 784)).sum().backward()
    assert model.clock.free_at - started == pytest.approx(0.05)


def test_workers_have_different_images(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.arange(40, dtype=torch.uint8).view(40, 1).expand(40, 784).reshape(40, 28, 28)
    monkeypatch.setattr(
        mlp, "load_arrays", lambda split: (pixels.numpy(), torch.zeros(40).byte().numpy())
    )
    setting = MlpSetting(workers=2, batch=7)
    seen: list[set[float]] = []
    for rank in range(2):
        batches = Images(setting, rank).batches()
        first = [next(batches) for _ in range(2)]
        assert all(images.shape == (7, 784) for images, _ in first)
        seen.append({float(v) for images, _ in first for v in images[:, 0]})
        assert len(seen[-1]) == 14  # none twice in a pass
    assert not seen[0] & seen[1]


def test_the_formulas_get_the_paper_s_quantities() -> None:
    setting = MlpSetting(workers=4)
    to_the_letter = symbols(setting, "2ps")
    assert (to_the_letter.n, to_the_letter.b, to_the_letter.w, to_the_letter.ps) == (
        60_000,
        100,
        4,
        2,
    )
    assert 8 * limit.model_bytes(setting.layers) == to_the_letter.W
    kind = symbols(setting, "2ps", in_batches=True)
    assert kind.n / kind.b == setting.epoch_steps
    ring = symbols(setting, "ring", in_batches=True)
    assert ring.n / ring.w == setting.epoch_steps


@pytest.mark.parametrize("system", MLP_SYSTEMS)
def test_every_system_is_predicted(system: str) -> None:
    alone, _ = predict_epochs(MlpSetting(workers=1), system)
    epochs, prediction = predict_epochs(MlpSetting(workers=4), system)
    assert epochs.refined == pytest.approx(150 * prediction.step_s)
    assert prediction.step_s > 0.3
    assert epochs.refined < alone.refined
    assert (alone.published is None) == (system == "p2p")
    assert epochs.published is not None
    assert epochs.published_in_batches is not None
    assert epochs.published > epochs.published_in_batches


def test_one_server_limits_many_workers_and_a_ring_s_links_do_not() -> None:
    assert predict_epochs(MlpSetting(workers=7), "1ps")[1].limited_by == "server"
    assert predict_epochs(MlpSetting(workers=7), "ring")[1].limited_by == "compute"


def test_errors_leave_out_what_was_cpu_bound_and_what_was_not_predicted() -> None:
    records = [
        record("1ps", 1, 100.0),
        record("1ps", 2, 60.0),
        record("ring", 1, 10.0, cpu_bound=True),
    ]
    found = {(e.system, e.model): e for e in errors_of(records)}
    assert set(found) == {
        (system, model)
        for system in ("1ps", "all")
        for model in ("refined", "published_in_batches")
    }
    refined = found["1ps", "refined"]
    assert (refined.points, refined.at_most) == (2, pytest.approx(0.5))
    assert refined.mean == pytest.approx((-0.1 + 0.5) / 2)
    assert found["all", "published_in_batches"].median == pytest.approx(0.1)


@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
def test_the_command_writes_records_errors_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MlpSetting] = []

    def measured(setting: MlpSetting, *, progress: object) -> list[MlpRecord]:
        del progress
        asked.append(setting)
        return [record(name, setting.workers, 90.0) for name in setting.systems]

    monkeypatch.setattr("foreprop_lab.experiments.mlp.command.run_mlp", measured)
    options = f"lab mlp --quick --systems 1ps,ring --rate 50Mbit --out {tmp_path}".split()
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert [s.workers for s in asked] == [1, 2, 4]
    assert {(s.steps, s.rate_bits_per_s) for s in asked} == {(10, 50e6)}
    kept = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=list[MlpRecord])
    assert [(r.system, r.workers) for r in kept] == [
        (name, count) for count in (1, 2, 4) for name in ("1ps", "ring")
    ]
    errors = msgspec.json.decode((tmp_path / "errors.json").read_bytes(), type=list[mlprun.Errors])
    assert {e.system for e in errors} == {"1ps", "ring", "all"}
    for name in ("epoch-times", "throughput", "comparison"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
        assert (tmp_path / f"{name}.svg").exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"workers": 0}, "workers is 0; at least 1"),
        ({"workers": 61}, "workers is 61; at most 64 with all servers"),
        ({"systems": ("3ps",)}, "systems is '3ps'; there are 1ps"),
        ({"systems": ("ring", "ring")}, "systems is 'ring, ring'"),
        ({"preset": "quick"}, "preset is 'quick'; there are p3"),
        ({"batch": 40_000}, "batch is 40000; a worker's share has 30000"),
        ({"compute_s": 0.0}, "compute_s is 0.0; it must be positive"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        MlpSetting(**({"workers": 2} | changes))


@pytest.mark.parametrize("text", ["one", "1,1", ","])
def test_numbers_of_workers_are_numbers(text: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lab", "mlp", "--nodes", text, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"--nodes is {text!r}" in result.stderr
