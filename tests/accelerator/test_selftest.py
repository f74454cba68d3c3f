"""``foreprop doctor --self-test`` on a real accelerator."""

from __future__ import annotations

import torch

from foreprop.tools.doctor.facts import gather_devices
from foreprop.tools.doctor.selftest import train_on
from tests.accelerator.here import device_or_skip

DEVICE = device_or_skip()


def test_it_passes() -> None:
    outcomes = train_on(DEVICE)
    for outcome in outcomes:
        print(outcome.what, outcome.told)
    assert [outcome.ok for outcome in outcomes] == [True] * 4
    assert "pinned host memory" in outcomes[0].told


def test_the_doctor_names_the_device() -> None:
    found = gather_devices(torch, None)
    print(found)
    assert found.devices_error is None
    assert not found.unseen_devices
    assert found.devices[0].name == str(DEVICE)
    assert found.devices[0].memory_bytes
