"""Each wait of the device path, by a device that does as late, or as early, as it can.

`mutations.py` removes them one at a time; one of these tests, or of `test_training.py`, must fail.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foreprop.config import Config
from foreprop.engine import asyncdevice
from foreprop.engine.asyncdevice import describe_devices
from foreprop.engine.gpumemory import (
    AsyncStagedMemory,
    CountingAccelerator,
    DeviceMemory,
    StagedMemory,
    Stager,
    staged_memory_of,
)
from foreprop.features.collectives.gpu import DeviceWork, GpuWork
from foreprop.params.setup import MemoryFactory
from tests.lagging.device import DEVICE, MEMORY, Event, Stream, lagging
from tests.lagging.streams import LINES, current_stream, on_stream, synchronize

HERE = torch.device(DEVICE, 0)
BLOCKING = "event.synchronize (blocking)"
"""On CUDA the thread sleeps; it would spin for another event, or a stream."""
ROOT = Path(__file__).parents[2]


class Staging:
    """A parameter of four elements, and what its stager has said is ready."""

    def __init__(self) -> None:
        self.stager = Stager(CountingAccelerator(HERE))
        self.parameter = torch.zeros(4).to(DEVICE)
        self.memory = AsyncStagedMemory(self.parameter, self.stager)
        self.ready: list[list[float]] = []

    def stage(self, gradient: torch.Tensor) -> None:
        def ready(its_bytes: Any) -> None:
            # as ParameterArrival does, who calls holds the gradient
            assert gradient.numel() == 4
            self.ready.append(torch.frombuffer(bytearray(its_bytes), dtype=torch.float32).tolist())

        self.memory.stage_gradient(gradient, ready)

    def reply(self, value: float) -> None:
        """A server's answer is written to the host's memory."""
        self.memory.values[:] = torch.full((4,), float(value)).numpy().tobytes()


@pytest.fixture
def stagings() -> Iterator[Callable[[], Staging]]:
    """Makes them, and ends their threads."""
    made: list[Staging] = []

    def make() -> Staging:
        made.append(Staging())
        return made[-1]

    asyncdevice.can_pin.cache_clear()
    yield make
    asyncdevice.can_pin.cache_clear()
    for staging in made:
        staging.stager.stop()


Make = Callable[[], Staging]


@pytest.mark.parametrize("manner", [{"stream_0": "late", "manner": "eager"}, {"manner": "late"}])
def test_a_gradient_is_ready_when_it_is_computed_and_copied(
    manner: dict[str, str], stagings: Make
) -> None:
    with lagging(**manner):
        staging = stagings()
        gradient = torch.ones(4).to(DEVICE)
        gradient.mul_(3)
        staging.stage(gradient)
        staging.memory.await_staged()
        assert staging.ready == [[3.0] * 4]


def stage_twos(staging: Staging) -> None:
    """From then on it is known who has waited for the device."""
    gradient = torch.ones(4).to(DEVICE)
    LINES.host_waits.clear()
    staging.stage(gradient * 2)
    staging.memory.await_staged()


def test_the_training_thread_waits_for_no_copy(stagings: Make) -> None:
    with lagging(manner="late"):
        staging = stagings()
        stage_twos(staging)
        staging.reply(5)
        staging.memory.land()
        assert set(LINES.host_waits) == {("foreprop-stage", BLOCKING)}
        assert staging.parameter.tolist() == [5.0] * 4


def test_a_device_whose_waits_give_no_choice_is_waited_for_too(
    monkeypatch: pytest.MonkeyPatch, stagings: Make
) -> None:
    """As XPU's up to torch 2.13."""

    class Plain(Event):
        def __init__(self, enable_timing: bool = False) -> None:
            super().__init__(enable_timing)

    monkeypatch.setattr(type(torch.get_device_module(DEVICE)), "Event", Plain)
    with lagging(manner="late"):
        staging = stagings()
        stage_twos(staging)
        assert set(LINES.host_waits) == {("foreprop-stage", "event.synchronize")}
        assert staging.ready == [[2.0] * 4]


def test_values_are_not_overwritten_before_they_have_landed(stagings: Make) -> None:
    """Also where this rank has no gradient, and so no copy to wait for: another's reply comes."""
    with lagging(manner="late"):
        staging = stagings()
        staging.reply(5)
        staging.memory.land()
        staging.memory.pass_by(lambda: staging.reply(6))
        staging.memory.await_staged()
        assert staging.parameter.tolist() == [5.0] * 4
        staging.memory.land()
        assert staging.parameter.tolist() == [6.0] * 4


def test_whoever_trains_finds_what_has_landed_on_another_stream(stagings: Make) -> None:
    with lagging(manner="eager", stream_1="late"):
        staging = stagings()
        elsewhere, host = Stream(), torch.zeros(4).pin_memory()
        assert elsewhere.stream_id == 1
        staging.stage(torch.ones(4).to(DEVICE))
        staging.memory.await_staged()
        staging.reply(5)
        with on_stream(elsewhere):
            staging.memory.land()
        host.copy_(staging.parameter, non_blocking=True)
        current_stream().synchronize()
        assert host.tolist() == [5.0] * 4


def test_what_lands_on_another_stream_waits_for_who_trains(stagings: Make) -> None:
    """The backward pass may still read the old value."""
    with lagging(manner="eager", stream_0="late"):
        staging = stagings()
        elsewhere, host = Stream(), torch.zeros(4).pin_memory()
        staging.stage(torch.ones(4).to(DEVICE))
        staging.memory.await_staged()
        staging.reply(5)
        host.copy_(staging.parameter, non_blocking=True)
        with on_stream(elsewhere):
            staging.memory.land()
            elsewhere.synchronize()
        current_stream().synchronize()
        assert host.tolist() == [0.0] * 4


def test_a_gradient_that_stays_is_ready_when_it_is_computed(stagings: Make) -> None:
    with lagging(manner="late"):
        memory, gradient = DeviceMemory(stagings().stager), torch.ones(2, 2).to(DEVICE)
        found: list[bool] = []
        kept: list[torch.Tensor] = []

        def look(flat: torch.Tensor) -> None:
            # whoever takes it waits for nothing: all that is queued must have been done
            found.append(LINES[0].is_idle())
            kept.append(flat)  # or freeing it would be queued, too

        gradient.mul_(3)
        memory.stage_gradient(gradient.t(), look)
        memory.await_staged()
        assert found == [True]
        gradient.mul_(3)
        memory.pass_by(lambda: found.append(LINES[0].is_idle()))
        memory.await_staged()
        assert found == [True, True]


@pytest.mark.parametrize("kind", [DeviceWork, GpuWork])
def test_a_thread_beside_has_a_stream_of_its_own_and_waits_for_it(kind: type) -> None:
    with lagging(manner="late"):
        parameter = torch.zeros(4).to(DEVICE)
        work: Any = GpuWork(HERE) if kind is GpuWork else DeviceWork([parameter])
        with work.in_thread():
            assert current_stream().stream_id != 0
            parameter.add_(1)
            LINES.host_waits.clear()
            work.finish()
            assert current_stream().line.is_idle()
            assert {what for _, what in LINES.host_waits} == {BLOCKING}
        assert current_stream().stream_id == 0


def test_a_part_that_another_stream_uses_is_kept_for_it() -> None:
    with lagging(manner="eager", stream_1="late"):
        work, host = GpuWork(HERE), torch.zeros(4).pin_memory()
        part = torch.ones(4).to(DEVICE).view(torch.uint8)
        synchronize()
        with on_stream(Stream()):
            assert current_stream().stream_id == 1
            host.copy_(work.flat(part, torch.float32), non_blocking=True)
            del part
            LINES[0].mark().wait()
            work.finish()
        assert host.tolist() == [1.0] * 4


# What a device lacks.
def test_without_pinned_memory_a_thread_beside_copies(
    monkeypatch: pytest.MonkeyPatch, stagings: Make
) -> None:
    monkeypatch.setattr(MEMORY, "can_pin", False)
    with lagging(manner="late"):
        staging = stagings()
        gradient = torch.ones(4).to(DEVICE)
        LINES.host_waits.clear()
        with on_stream(Stream()):
            gradient.mul_(3)
            staging.stage(gradient)
        staging.memory.await_staged()
        assert staging.ready == [[3.0] * 4]
        assert {thread for thread, _ in LINES.host_waits} == {"foreprop-stage"}
        staging.reply(5)
        staging.memory.land()
        staging.reply(6)
        assert staging.parameter.tolist() == [5.0] * 4
        assert describe_devices([staging.parameter]) == (
            "; parameters on lagging:0 (no pinned memory there: a thread beside training copies)"
        )


def test_without_streams_copies_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(torch.get_device_module(DEVICE)), "Stream")
    with lagging(manner="late"):
        parameter = torch.zeros(4).to(DEVICE)
        memory = MemoryFactory(Config()).memory_of(parameter)
        assert isinstance(memory, StagedMemory)
        ready: list[list[float]] = []
        memory.stage_gradient(
            torch.ones(4).to(DEVICE) * 3,
            lambda view: ready.append(torch.frombuffer(view, dtype=torch.float32).tolist()),
        )
        assert ready == [[3.0] * 4]
        memory.values[:] = torch.full((4,), 5.0).numpy().tobytes()
        memory.land()
        memory.values[:] = torch.full((4,), 6.0).numpy().tobytes()
        assert parameter.tolist() == [5.0] * 4
        assert describe_devices([parameter]) == (
            "; parameters on lagging:0 (no streams there: copies hold up training)"
        )


def test_parameters_in_host_memory_are_not_described() -> None:
    assert describe_devices([torch.zeros(1), torch.zeros(1, device="meta")]) == ""


def test_a_device_has_one_thread_that_waits() -> None:
    with lagging():
        stagers: dict[torch.device, Stager] = {}
        parameters = [torch.zeros(2).to(DEVICE) for _ in range(3)]
        for parameter in parameters:
            staged_memory_of(parameter, stagers, stays=False)
        assert list(stagers) == [HERE]
        stagers[HERE].stop()


# Which device a worker takes.
def launched(monkeypatch: pytest.MonkeyPatch, local_rank: int, count: int) -> None:
    for name, value in {"RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(value))
    module = type(torch.get_device_module(DEVICE))
    monkeypatch.setattr(module, "device_count", staticmethod(lambda: count))
    asyncdevice._warn_of_shared.cache_clear()


@pytest.mark.parametrize(
    ("local_rank", "count", "warns"), [(1, 2, True), (0, 2, False), (1, 1, False)]
)
def test_a_worker_on_the_nodes_first_device_is_told_where_it_has_one_of_its_own(
    local_rank: int,
    count: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one visible device, by CUDA_VISIBLE_DEVICES, the first one is the worker's own."""
    launched(monkeypatch, local_rank, count)
    with lagging():
        factory = MemoryFactory(Config())
        for _ in range(2):
            factory.memory_of(torch.zeros(4).to(DEVICE))
        factory.stop()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warns
    if warns:
        assert "parameters are on lagging:0, but LOCAL_RANK is 1 and torch sees 2" in told[0]
        assert "torch.device('lagging', int(os.environ['LOCAL_RANK']))" in told[0]


@pytest.mark.long
def test_the_example_trains_on_the_device_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`examples/train_mixed_precision.py`, as one worker on the device."""
    example = ROOT / "examples" / "train_mixed_precision.py"
    used: list[torch.device] = []
    autocast = torch.autocast
    here = torch.device(DEVICE)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: here)
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **how: used.append(kind) or autocast(kind, **how)
    )
    monkeypatch.setattr("sys.argv", [str(example), "--epochs", "1", "--dtype", "float16"])
    with lagging(seed=2):
        runpy.run_path(str(example), run_name="__main__")
    assert set(used) == {DEVICE}
    assert "epoch 1: loss" in capsys.readouterr().out
