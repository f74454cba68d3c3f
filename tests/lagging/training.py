"""Trains the same on the lagging device and on the CPU, and compares the bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.devices.training import Scenario, check_same
from tests.devices.training import train as train_anywhere
from tests.lagging.device import DEVICE, Stream, lagging
from tests.lagging.streams import on_stream


def train(scenario: Scenario, device: str) -> list[dict[str, torch.Tensor]]:
    """By rank. As every rank would in a process of its own, it computes on its own stream."""

    def own_stream() -> AbstractContextManager[Any]:
        return on_stream(Stream() if device == DEVICE else None)

    return train_anywhere(scenario, device, on_stream=own_stream)


def check_on_device(
    scenario: Scenario, wanted: Sequence[Mapping[str, torch.Tensor]], seed: int, **manners: str
) -> None:
    with lagging(seed, **manners):
        got = train(scenario, DEVICE)
    check_same(got, wanted)
