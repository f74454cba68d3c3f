"""What two servers' receiving threads do with one averaged parameter at the same time."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from foreprop.engine.asyncdevice import TorchAccelerator
from foreprop.engine.gpumemory import AsyncStagedMemory
from foreprop.engine.memory import Memory
from foreprop.params.averaged import AveragedGradient, Averages
from foreprop.params.parameter import Parameter


class _Session:
    """As much of a session as an averaged parameter asks at its start."""

    rounds = None
    settling = threading.RLock()
    measures = keeps_averages = False

    def engine_of(self, parameter: int) -> tuple[Any, int]:
        return SimpleNamespace(checks_gradients=False, lends=False), parameter

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        return Memory()


def test_answers_that_come_at_once_land_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = _Session()
    parameter = nn.Parameter(torch.zeros(4))
    gradient = AveragedGradient(parameter, session, session)
    averages = partial(Averages, gradient=gradient, averaging=session)
    averaged = Parameter(0, "weight", parameter, session, arrival=averages)
    gradient.arrival.serial = 1  # a round has begun
    empty = torch.empty

    def empty_late(*args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.05)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty_late)
    rooms: list[memoryview] = []
    threads = [
        threading.Thread(target=lambda: rooms.append(averaged.arrival.values)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    first, second = rooms
    first[:4] = b"\x01\x02\x03\x04"
    assert bytes(second[:4]) == b"\x01\x02\x03\x04"
    averaged.detach()


def test_a_second_thread_that_lands_values_for_a_device_gets_what_the_first_has_made() -> None:
    """Since Python 3.12 both may be in `functools.cached_property`'s function at once."""

    class Device:
        def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

    memory: Any = AsyncStagedMemory.__new__(AsyncStagedMemory)
    memory._parameter, memory._device = torch.zeros(4), Device()
    make: Any = AsyncStagedMemory._values.func
    assert make(memory) is make(memory) is memory._values

    accelerator: Any = TorchAccelerator.__new__(TorchAccelerator)
    accelerator.device = torch.device("cpu")
    accelerator._module = SimpleNamespace(Stream=lambda device: object())
    make = TorchAccelerator._copying.func
    assert make(accelerator) is make(accelerator) is accelerator._copying
