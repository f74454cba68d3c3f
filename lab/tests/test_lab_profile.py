"""From a user's model to the lab: `foreprop.profile` measures it, and the lab trains its arrays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner, Result

import foreprop
from foreprop.plan.profile import Profile
from foreprop.tools.cli.app import app
from foreprop_lab.setting.records import read_records

STEPS = {"steps": 3, "warm_up": 1}


def convolutional() -> Profile:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 12 * 12, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    return foreprop.profile(model, optimizer, batch, nn.CrossEntropyLoss(), name="cnn", **STEPS)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 32, sparse=True)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.classes = nn.Linear(64, 5000)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.words(text[:, :-1]))
        return F.cross_entropy(self.classes(hidden).flatten(0, 1), text[:, 1:].flatten())


def language() -> Profile:
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = torch.randint(5000, (8, 21))
    return foreprop.profile(model, optimizer, text, Words.loss, name="words", **STEPS)


PROFILES: dict[str, Any] = {"cnn": convolutional, "words": language}


def run_command(command: str, systems: str, profile: Profile, folder: Path) -> Result:
    path = folder / "profile.json"
    profile.save(path)
    options = f"--systems {systems} --nodes 2 --scale 1 --steps 2"
    arguments = f"lab {command} --profile {path} {options} --out {folder}"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    return result


def check_records(folder: Path, profile: Profile) -> None:
    size_bytes = 4 * sum(math.prod(array.shape) for array in profile.arrays)
    for record in read_records(folder / "results.json"):
        assert record.model == profile.name
        assert record.compute_s == pytest.approx(profile.measured_s)
        wire_s = record.compute_s  # balance 1.0
        assert record.rate_bits_per_s * wire_s == pytest.approx(8 * size_bytes)
        assert record.iteration_s.median >= 0.95 * record.limit_s


@pytest.mark.parametrize("name", PROFILES)
def test_a_measured_model_can_be_simulated(name: str, tmp_path: Path) -> None:
    profile = PROFILES[name]()
    run_command("simulate", "p3,kvstore,ring,ddp", profile, tmp_path)
    check_records(tmp_path, profile)
    assert len(read_records(tmp_path / "results.json")) == 4


@pytest.mark.long
@pytest.mark.process
@pytest.mark.lab
@pytest.mark.parametrize("name", PROFILES)
def test_a_measured_model_can_be_run_in_the_lab(name: str, tmp_path: Path) -> None:
    profile = PROFILES[name]()
    result = run_command("run", "p3,ring,ddp", profile, tmp_path)
    if "Notice" in result.output:
        pytest.skip("no links made by the kernel")
    check_records(tmp_path, profile)
    assert len(read_records(tmp_path / "results.json")) == 3


def test_the_language_model_has_its_share_of_rows() -> None:
    """8 x 20 words of 5,000."""
    (table, *others) = language().arrays
    assert table.name == "words.weight"
    assert 0.02 < (table.alpha or 0) <= 160 / 5000
    assert all(array.alpha is None for array in others)
