"""The native plane looks for the number that a device copies behind each gradient."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.engine import gpumemory
from foreprop.engine.gpumemory import AsyncStagedMemory, CountingAccelerator, Stager
from foreprop.engine.memory import Copying
from foreprop.engine.native import maybe_library
from foreprop.engine.plane import Plane
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.devices.scenarios import Uneven, accumulating, clipping, layers, plain, zeroing
from tests.devices.training import Scenario
from tests.lagging.device import DEVICE, lagging
from tests.lagging.streams import LINES, LONGEST_WAIT_S, DeviceError, current_stream
from tests.lagging.training import check_on_device, train

pytestmark = pytest.mark.skipif(maybe_library() is None, reason="the plane was not built")
NATIVE = {"architecture": "p2p", "update": "workers"}
FOUND = {
    "plain": Scenario(layers, plain, settings=NATIVE),
    "uneven": Scenario(Uneven, plain, settings=NATIVE, steps=7),
    "clipping": Scenario(layers, clipping, settings=NATIVE),
    "accumulating": Scenario(layers, accumulating, settings=NATIVE),
    "zeroing": Scenario(layers, zeroing, settings=NATIVE),
    "wire": Scenario(layers, plain, settings=NATIVE | {"wire_dtype": "bfloat16"}),
    "pulling": Scenario(layers, plain, settings={"preset": "tensorflow", "update": "workers"}),
    "alone": Scenario(layers, plain, settings=NATIVE, ranks=1),
}


LAYERS = 6


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), *(nn.Linear(16, 16) for _ in range(LAYERS)))


@pytest.fixture
def no_stager(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a thread is to wait for a copy")

    monkeypatch.setattr(Stager, "submit", refuse)


@pytest.mark.parametrize("manner", ["late", "any"])
@pytest.mark.parametrize("name", FOUND)
@pytest.mark.usefixtures("no_stager")
def test_the_same_bits_and_no_thread_that_waits_for_copies(name: str, manner: str) -> None:
    check_on_device(FOUND[name], train(FOUND[name], "cpu"), seed=3, manner=manner)
    assert not [thread for thread, _ in LINES.host_waits if "stage" in thread]


def test_the_python_plane_has_a_thread_that_waits_for_copies() -> None:
    scenario = FOUND["uneven"]
    scenario = replace(scenario, settings={**scenario.settings, "plane": "python"})
    check_on_device(scenario, train(scenario, "cpu"), seed=3, manner="late")
    assert "foreprop-stage" in {thread for thread, _ in LINES.host_waits}


@pytest.mark.usefixtures("no_stager")
def test_the_same_bits_where_only_gradients_are_copied_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is held until the plane has been told of it: who does not wait sends an older one."""
    wanted = train(FOUND["alone"], "cpu")
    push, released = Plane.push, threading.Semaphore(0)
    start = CountingAccelerator.start_counted

    def held(device: Any, *given: Any) -> Copying:
        device._copying.line.put(lambda: released.acquire(timeout=60))
        return start(device, *given)

    def release(plane: Plane, *given: Any) -> None:
        push(plane, *given)
        assert given[-1] is not None
        assert plane.missing(given[0].parameter)[0][1] is None
        released.release()

    monkeypatch.setattr(CountingAccelerator, "start_counted", held)
    monkeypatch.setattr(Plane, "push", release)
    check_on_device(FOUND["alone"], wanted, seed=0, manner="eager")


def test_numbers_go_on_when_all_on_the_device_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpumemory, "_NUMBERS", 8)
    with lagging(seed=1):
        device = CountingAccelerator(torch.device(DEVICE, 0))
        source, target = torch.zeros(1).to(DEVICE), device.host_memory((1,), torch.float32)
        target.zero_()
        for count in range(1, 30):
            source.add_(1)
            assert device.start_counted([(target, source)], current_stream()).number == count
        device._copying.query()  # which has it hurry
        while device.word.item() < 29:
            assert target.item() <= device.word.item() + 1
        assert (device.word.item(), target.item()) == (29, 29)


def test_values_are_not_overwritten_before_they_have_landed() -> None:
    """Also where this rank has no gradient, and so no copy but that of the number."""
    with lagging(manner="late"):
        device = CountingAccelerator(torch.device(DEVICE, 0))
        parameter = torch.zeros(4).to(DEVICE)
        memory = AsyncStagedMemory(parameter, Stager(device))
        memory.counts = True
        memory.values[:] = torch.full((4,), 5.0).numpy().tobytes()
        memory.land()
        ready: list[Copying | None] = []
        memory.pass_by(lambda: ready.append(memory.copying))
        (copying,) = ready
        assert copying is not None
        while device.word.item() < copying.number:
            copying.check()
        memory.values[:] = bytes(16)
        assert parameter.tolist() == [5.0] * 4


def test_gradients_leave_while_the_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first layer's gradients it stands still, until all others' have left."""
    planes: list[Plane] = []
    push = Plane.push

    def note(plane: Plane, *given: Any) -> None:
        planes.append(plane)
        push(plane, *given)

    monkeypatch.setattr(Plane, "push", note)
    left: list[int] = []

    def loop(model: Any, optimizer: Any, batches: Any, session: Any) -> None:
        def hold() -> None:
            until_s = time.monotonic() + LONGEST_WAIT_S
            while (count := planes[0].statistics()[0] - before) < 2 * LAYERS:
                assert time.monotonic() < until_s
                time.sleep(0.001)
            left.append(count)

        for x, _ in batches:
            session.flush()
            current_stream().synchronize()
            before = planes[0].statistics()[0] if planes else 0
            if x is batches[-1][0]:
                found = model[0].register_forward_hook(
                    lambda *given: (
                        given[-1].register_hook(lambda _: current_stream().line.put(hold)) and None
                    )
                )
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.remove()

    with lagging(manner="eager"):
        train(Scenario(deep, loop, settings=NATIVE, ranks=1, steps=3), DEVICE)
    assert left == [2 * LAYERS]


class Stalls(logging.Handler):
    """What is reported to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.reported = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waits for" in record.getMessage():
            self.lines.append(record.getMessage())
            self.reported.set()


@pytest.fixture
def stalls() -> Iterator[Stalls]:
    handler = Stalls()
    logging.getLogger("foreprop").addHandler(handler)
    yield handler
    logging.getLogger("foreprop").removeHandler(handler)


def test_a_stall_says_that_the_gradient_is_still_copied(
    monkeypatch: pytest.MonkeyPatch, stalls: Stalls
) -> None:
    start = CountingAccelerator.start_counted

    def held(device: Any, *given: Any) -> Copying:
        device._copying.line.put(lambda: stalls.reported.wait(60))
        return start(device, *given)

    monkeypatch.setattr(CountingAccelerator, "start_counted", held)
    settings = NATIVE | {"stall_report_s": 0.3}
    with lagging(manner="eager"):
        train(Scenario(layers, plain, settings=settings, ranks=1), DEVICE)
    assert (
        ", stage push_queued: 1 of its slices are missing,"
        " for its gradient is still copied from the device"
    ) in stalls.lines[0]


def fail(device: Any, *_: Any) -> Copying:
    """As where CUDA has failed: nothing that follows is done, and each call says so."""
    device._copying.line.put(lambda: 1 / 0)
    return Copying(device.word.data_ptr(), 1 << 40, device._copying.query)


@pytest.mark.parametrize("then", ["wait", "close"])
def test_a_device_that_fails_is_told_to_who_waits_and_keeps_nobody_who_does_not(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = NATIVE | {"step_timeout_s": 1000.0}
    came: list[str] = []

    def work(world: World) -> None:
        torch.autograd.set_multithreading_enabled(False)
        model, batch = layers().to(DEVICE), torch.ones(2, 5).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = foreprop.parallelize(model, optimizer, world=world, **settings)
        model(batch).sum().backward()
        optimizer.step()
        model(batch)
        monkeypatch.setattr(CountingAccelerator, "start_counted", fail)
        model(batch).sum().backward()
        if then == "wait":
            optimizer.step()
            with pytest.raises(DeviceError, match="division by zero"):
                model(batch)
            came.append("told")
        session.close()
        came.append("closed")

    with pytest.raises(DeviceError, match="division by zero"), lagging(manner="eager"):
        run_cluster(1, work)
    assert came == ["told" if then == "wait" else "closed"]
