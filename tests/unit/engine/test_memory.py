"""The device path: what is staged, and when a gradient enters the queue."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from foreprop.config import Config
from foreprop.engine.asyncdevice import TorchAccelerator
from foreprop.engine.gpumemory import AsyncStagedMemory, StagedMemory, Stager
from foreprop.engine.memory import DirectMemory, bytes_of
from foreprop.errors import InternalError
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


def test_bytes_are_the_tensors_own_and_stay_as_long_as_they_are_looked_at() -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    view = bytes_of(tensor)
    assert (view.format, view.nbytes, view.readonly) == ("B", 4000, False)
    tensor[3] = 7.0
    assert torch.frombuffer(view, dtype=torch.float32)[3] == 7.0
    part = view[4:8]
    del tensor, view
    gc.collect()
    assert [torch.full((1000,), -1.0)[0], *torch.frombuffer(part, dtype=torch.float32)] == [-1, 1]


def test_bytes_of_nothing_and_of_one_in_odd_steps() -> None:
    nothing = bytes_of(torch.zeros(3, 0))
    nothing[:] = b""
    assert len(nothing) == 0
    one = torch.arange(9.0).as_strided((1, 1), (5, 7), 4)
    assert torch.frombuffer(bytes_of(one), dtype=torch.float32).tolist() == [4.0]


def test_bytes_are_not_those_of_other_values() -> None:
    negated = torch.randn(3, dtype=torch.complex64).conj().imag
    for other in (negated, torch.randn(4, 3).t(), torch.empty(3, device="meta")):
        with pytest.raises(InternalError, match="can only be viewed"):
            bytes_of(other)
