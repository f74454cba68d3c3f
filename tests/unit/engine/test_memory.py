"""The device path: what is staged, and when a gradient enters the queue."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from foreprop.config import Config
from foreprop.engine.asyncdevice import TorchAccelerator
from foreprop.engine.gpumemory import AsyncStagedMemory, StagedMemory, Stager
from foreprop.engine.memory import DirectMemory
from foreprop.params.setup import MemoryFactory


class FakeEvent:
    def __init__(self) -> None:
        self.completed = threading.Event()

    def synchronize(self) -> None:
        assert self.completed.wait(60)


class FakeDevice(TorchAccelerator):
    """Host memory, to which copies end when the test says so."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pins = True
        self.events: list[FakeEvent] = []

    def host_memory(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def start(self, target: torch.Tensor, source: torch.Tensor, here: Any) -> FakeEvent:
        target.copy_(source)
        self.events.append(FakeEvent())
        return self.events[-1]


def floats(view: memoryview) -> list[float]:
    return torch.frombuffer(view, dtype=torch.float32).tolist()


def test_a_contiguous_cpu_parameter_is_not_copied() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    memory = MemoryFactory(Config()).memory_of(parameter)
    assert isinstance(memory, DirectMemory)
    memory.values[:4] = torch.tensor([9.0]).numpy().tobytes()
    assert parameter[0, 0] == 9
    gradient = torch.ones(2, 3)
    seen: list[memoryview] = []
    memory.stage_gradient(gradient, seen.append)
    gradient[0, 0] = 5
    assert floats(seen[0])[0] == 5


def test_another_layout_is_staged_in_logical_order() -> None:
    values = torch.arange(24.0).reshape(1, 2, 3, 4)
    parameter = torch.nn.Parameter(values.to(memory_format=torch.channels_last))
    memory = MemoryFactory(Config()).memory_of(parameter)
    assert isinstance(memory, StagedMemory)
    memory.before_sending_values()
    assert floats(memory.values) == values.flatten().tolist()
    seen: list[memoryview] = []
    memory.stage_gradient(parameter.detach() * 2, seen.append)
    assert floats(seen[0]) == (values * 2).flatten().tolist()
    memory.values[:4] = torch.tensor([7.0]).numpy().tobytes()
    memory.land()
    assert parameter[0, 0, 0, 0] == 7


def test_a_gradient_is_ready_when_its_event_has_completed_not_before() -> None:
    device = FakeDevice()
    stager = Stager(device)
    memories = [AsyncStagedMemory(torch.nn.Parameter(torch.zeros(2)), stager) for _ in range(2)]
    ready: list[tuple[int, list[float]]] = []
    for i, memory in enumerate(memories):
        memory.stage_gradient(
            torch.full((2,), float(i)), lambda view, i=i: ready.append((i, floats(view)))
        )
    assert ready == []
    device.events[1].completed.set()
    threading.Event().wait(0.05)
    assert ready == [], "events complete in order: the first holds up the second"
    device.events[0].completed.set()
    for memory in memories:
        memory.await_staged()
    assert ready == [(0, [0.0, 0.0]), (1, [1.0, 1.0])]
    stager.stop()


class FailingEvent:
    def synchronize(self) -> None:
        raise RuntimeError("the device has failed")


class FailingDevice(FakeDevice):
    def start(self, target: torch.Tensor, source: torch.Tensor, here: Any) -> Any:
        return FailingEvent()


def test_whoever_waits_learns_that_the_device_has_failed_and_others_go_on() -> None:
    stager = Stager(FailingDevice())
    memories = [AsyncStagedMemory(torch.nn.Parameter(torch.zeros(2)), stager) for _ in range(2)]
    for memory in memories:
        memory.stage_gradient(torch.ones(2), lambda view: None)
    for memory in memories:
        with pytest.raises(RuntimeError, match="the device has failed"):
            memory.await_staged()
    stager.stop()
