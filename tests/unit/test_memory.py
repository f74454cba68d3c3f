"""The device path: what is staged, and when a gradient enters the queue."""

from __future__ import annotations

import threading

import torch

from foreprop.path.gpumemory import AsyncStagedMemory, StagedMemory, Stager
from foreprop.path.memory import DirectMemory, MemoryFactory


class FakeEvent:
    def __init__(self) -> None:
        self.completed = threading.Event()

    def synchronize(self) -> None:
        assert self.completed.wait(5)


class FakeCopier:
    """A device whose copies end when the test says so."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []

    def start(self, target: torch.Tensor, source: torch.Tensor) -> FakeEvent:
        target.copy_(source)
        self.events.append(FakeEvent())
        return self.events[-1]


def floats(view: memoryview) -> list[float]:
    return torch.frombuffer(view, dtype=torch.float32).tolist()


def test_a_contiguous_cpu_parameter_is_not_copied() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    memory = MemoryFactory().memory_of(parameter)
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
    memory = MemoryFactory().memory_of(parameter)
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
    copier = FakeCopier()
    stager = Stager(copier)
    memories = [
        AsyncStagedMemory(torch.nn.Parameter(torch.zeros(2)), stager, pinned=False)
        for _ in range(2)
    ]
    ready: list[tuple[int, list[float]]] = []
    for i, memory in enumerate(memories):
        memory.stage_gradient(
            torch.full((2,), float(i)), lambda view, i=i: ready.append((i, floats(view)))
        )
    assert ready == []
    copier.events[1].completed.set()
    threading.Event().wait(0.05)
    assert ready == [], "events complete in order: the first holds up the second"
    copier.events[0].completed.set()
    for memory in memories:
        memory.await_staged()
    assert ready == [(0, [0.0, 0.0]), (1, [1.0, 1.0])]
    stager.stop()
