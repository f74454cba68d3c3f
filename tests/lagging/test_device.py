"""The lagging device itself: each missing wait shows, and what waits is right."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.lagging import streams
from tests.lagging.device import DEVICE, MEMORY, Event, Stream, lagging
from tests.lagging.streams import (
    LINES,
    DeviceError,
    current_stream,
    on_stream,
    synchronize,
)


def ones(elems: int = 4) -> torch.Tensor:
    return torch.ones(elems).to(DEVICE)


def pinned(elems: int = 4) -> torch.Tensor:
    return torch.zeros(elems).pin_memory()


@pytest.fixture(autouse=True)
def _late_is_until_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LATE_S", 60.0)


def test_operations_return_before_they_are_done() -> None:
    with lagging(manner="late"):
        x, host = ones(), pinned()
        host.copy_(x + 1, non_blocking=True)
        assert host.tolist() == [0.0] * 4, "the copy has not been waited for"
        synchronize()
        assert host.tolist() == [2.0] * 4
    assert MEMORY.held_bytes == x.nbytes


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another_finds_old_values(waits: bool) -> None:
    with lagging(stream_0="late", stream_1="eager"):
        x, host, other = ones(), pinned(), Stream()
        x.mul_(3)
        if waits:
            other.wait_stream(current_stream())
        with on_stream(other):
            host.copy_(x, non_blocking=True)
        other.synchronize()
        assert host.tolist() == [3.0 if waits else 1.0] * 4


def test_a_copy_to_the_device_reads_pinned_memory_when_it_is_made() -> None:
    with lagging(manner="late"):
        host, x = pinned(), ones()
        x.copy_(host, non_blocking=True)
        host.fill_(7)  # too early
        assert x.cpu().tolist() == [7.0] * 4
        pageable = torch.zeros(4)
        x.copy_(pageable)
        pageable.fill_(7)
        assert x.cpu().tolist() == [0.0] * 4


def test_without_pinned_memory_a_copy_holds_up_the_caller() -> None:
    with lagging(manner="late"):
        x = ones()
        LINES.host_waits.clear()
        pageable = torch.zeros(4)
        pageable.copy_(x, non_blocking=True)
        assert pageable.tolist() == [1.0] * 4
        assert [what for _, what in LINES.host_waits] == ["copy"]


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_lost_to_streams_that_have_not_recorded_it(recorded: bool) -> None:
    with lagging(stream_0="eager", stream_1="late"):
        x, host, other = ones(), pinned(), Stream()
        other.wait_stream(current_stream())
        with on_stream(other):
            host.copy_(x, non_blocking=True)
        if recorded:
            x.record_stream(other)
        del x
        current_stream().synchronize()
        other.synchronize()
        assert host.isnan().all() == (not recorded)


def test_views_share_memory_in_place() -> None:
    with lagging(seed=3):
        x = torch.arange(12.0).to(DEVICE).view(3, 4)
        x.t()[1:3].mul_(10)
        x[:, 3] = -1
        x.view(-1)[0] = 5
        wanted = torch.arange(12.0).view(3, 4)
        wanted.t()[1:3].mul_(10)
        wanted[:, 3] = -1
        wanted.view(-1)[0] = 5
        assert torch.equal(x.cpu(), wanted)
        assert torch.equal(x.to(memory_format=torch.contiguous_format).cpu(), wanted)


def test_events_tell_the_devices_time() -> None:
    with lagging(manner="late"):
        first, second = Event(enable_timing=True), Event(enable_timing=True)
        x = ones()
        first.record()
        for _ in range(3):
            x.mul_(2)
        second.record()
        assert not second.query()
        second.synchronize()
        assert second.query()
        assert first.elapsed_time(second) > 0


def test_a_failed_job_is_told_to_who_waits() -> None:
    def fail_on_device() -> None:
        with lagging(seed=1):
            numbers = torch.tensor([0, 99]).to(DEVICE)
            nn.functional.embedding(numbers, torch.zeros(3, 2).to(DEVICE)).cpu()

    with pytest.raises(DeviceError, match="index out of range"):
        fail_on_device()


def test_devices_do_not_mix() -> None:
    with lagging(), pytest.raises(RuntimeError, match=r"(?i)expected all tensors"):
        ones() + torch.ones(4)


def test_a_seed_lags_the_same_each_time() -> None:
    def delays() -> list[float]:
        with lagging(seed=12, manner="lag"):
            line = LINES[1]
            return [line._delay_s() for _ in range(20)]

    assert delays() == delays()
    assert 0.0 < sum(delays()) < 0.02


def test_nothing_is_left_behind() -> None:
    with lagging(seed=2):
        x = ones()
        with on_stream(Stream()):
            x.add_(1)
        names = {thread.name for thread in threading.enumerate()}
        assert {"lagging-0", "lagging-1"} <= names
    del x
    assert not any(thread.name.startswith(DEVICE) for thread in threading.enumerate())
    assert not MEMORY.held_bytes
    assert not MEMORY.blocks
