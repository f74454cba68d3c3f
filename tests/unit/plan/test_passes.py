"""The clocks; what passes measure is in tests/conformance/test_profile.py."""

from __future__ import annotations

import pytest
import torch

from foreprop.plan.passes import Clock, DeviceClock, clock_of


def test_a_host_clock_tells_seconds() -> None:
    clock = Clock()
    first = clock.mark()
    clock.settle()
    second = clock.mark()
    assert 0 <= clock.seconds(first, second) < 60
    assert clock.seconds(first, second) == -clock.seconds(second, first)


class Gpu:
    """Stands for ``torch.cuda``: an event is over when the device has got to it."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.now_ms = 0.0
        self.Stream = self.stream = None

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def synchronize(self, device: torch.device) -> None:
        self.story.append(f"synchronize {device}")

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self, stream: str) -> None:
        self.gpu.story.append(f"record on {stream}")
        self.at_ms = self.gpu.now_ms

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_a_gpus_clock_marks_its_stream_and_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch, "cuda", gpu)
    clock = clock_of(torch.device("cuda", 1))
    assert isinstance(clock, DeviceClock)
    first = clock.mark()
    gpu.now_ms = 250.0
    second = clock.mark()
    assert gpu.story == ["record on stream of cuda:1"] * 2
    clock.settle()
    assert gpu.story[2:] == ["synchronize cuda:1"]
    assert clock.seconds(first, second) == 0.25


class OneStream:
    """Stands for ``torch.mps``, which has events and no streams."""

    def __init__(self) -> None:
        self.story: list[str] = []

    def synchronize(self) -> None:
        self.story.append("synchronize")

    def Event(self, *, enable_timing: bool) -> OneStream:
        assert enable_timing
        return self

    def record(self) -> None:
        self.story.append("record")


def test_a_device_without_streams_has_a_clock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = OneStream()
    monkeypatch.setattr(torch, "mps", device)
    clock = clock_of(torch.device("mps"))
    clock.mark()
    clock.settle()
    assert device.story == ["record", "synchronize"]
