"""``foreprop doctor --self-test``, on the lagging device, and where something is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from foreprop.engine.gpumemory import AsyncStagedMemory
from foreprop.errors import ConfigError
from foreprop.tools.cli import app as cli
from foreprop.tools.doctor.selftest import chosen_device, train_on
from tests.lagging.device import DEVICE, lagging


def test_a_device_that_lags_passes() -> None:
    with lagging(seed=1):
        outcomes = train_on(chosen_device(DEVICE))
    assert [outcome.ok for outcome in outcomes] == [True] * 4
    assert "pinned host memory" in outcomes[0].told
    assert outcomes[2].told.startswith("the same bits")
    assert outcomes[3].told.startswith("values differ by up to 0;")


def test_values_that_do_not_land_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncStagedMemory, "land", lambda memory: None)
    with lagging(seed=1):
        outcomes = train_on(torch.device(DEVICE))
    assert [outcome.ok for outcome in outcomes] == [True, True, True, False]
    assert "more than float32 explains" in outcomes[3].told


def test_what_torch_cannot_compute_on_is_named() -> None:
    with pytest.raises(ConfigError, match="device is 'xpu', on which torch"):
        chosen_device("xpu")


def test_the_command_tells_outcomes() -> None:
    ran = CliRunner().invoke(cli.app, ["doctor", "--self-test", "--device", "cpu", "--json"])
    assert ran.exit_code == 0
    found = json.loads(ran.stdout)
    assert found["device"] == "cpu"
    assert [outcome["ok"] for outcome in found["outcomes"]] == [True] * 4


def test_a_device_without_the_self_test_is_an_error() -> None:
    ran = CliRunner().invoke(cli.app, ["doctor", "--device", "cpu"])
    assert ran.exit_code
    assert "--device is 'cpu', which only --self-test uses" in ran.output
