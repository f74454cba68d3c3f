"""The emulated accelerator on a host whose clock only the test moves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foreprop.plan.profile import Layer, load_profile
from foreprop_lab.lab import accelerator
from foreprop_lab.lab.accelerator import EmulatedLayer, EmulatedModel, Launches
from foreprop_lab.setting.unevenness import Unevenness

LAYERS = [
    Layer(name="a", sizes_elems=(6, 2), forward_s=1.0, backward_s=2.0),
    Layer(name="b", sizes_elems=(5,), forward_s=3.0, backward_s=6.0),
    Layer(name="c", sizes_elems=(4,), forward_s=0.5, backward_s=1.0),
]
FORWARD_S = 4.5
STEP_S = 13.5


class Host:
    """Stands for the module ``time``: time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class LateParameter(torch.nn.Parameter):
    """Comes ``late_s`` after it has been asked for."""

    host: Host
    late_s: float

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        self.host.now += self.late_s
        return super().view_as(other)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(accelerator, "time", host)
    return host


def layer_of(model: EmulatedModel, index: int) -> EmulatedLayer:
    layer = model[index]
    assert isinstance(layer, EmulatedLayer)
    return layer


def forward(model: EmulatedModel) -> torch.Tensor:
    result: torch.Tensor = model(torch.ones(1, requires_grad=True))
    return result.sum()


def make_late(model: EmulatedModel, index: int, host: Host, late_s: float) -> None:
    layer = layer_of(model, index)
    late = LateParameter(layer.array0.detach())
    late.host, late.late_s = host, late_s
    layer.array0 = late


def delay_host(model: EmulatedModel, index: int, host: Host, seconds: float) -> None:
    """What Python, a busy CPU or the optimizer do between layers."""

    def delay(*_: Any) -> None:
        host.now += seconds

    model[index].register_forward_pre_hook(delay)


def test_gradients_have_the_real_shapes(host: Host) -> None:
    model = EmulatedModel(LAYERS)
    forward(model).backward()
    shapes = [tuple(p.shape) for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    assert shapes == [(6,), (2,), (5,), (4,)]
    assert [tuple(g.shape) for g in gradients if g is not None] == shapes
    assert all(g is not None and bool((g != 0).all()) for g in gradients)


def test_a_packaged_profile_has_a_parameter_for_each_array(host: Host) -> None:
    profile = load_profile("resnet110_cifar")
    layers = profile.layers(scale=3, compute_s=0.1)
    model = EmulatedModel(layers)
    forward(model).backward()
    sizes = [size for layer in layers for size in layer.sizes_elems]
    assert len(sizes) == len(profile.arrays)
    assert [p.numel() for p in model.parameters()] == sizes
    assert [p.grad.numel() for p in model.parameters() if p.grad is not None] == sizes


def test_layers_occupy_the_clock_in_forward_and_backward_order(host: Host) -> None:
    model = EmulatedModel(LAYERS)
    started, ended = host.now, list[tuple[int, float]]()
    for index, parameter in enumerate(model.parameters()):

        def gradient_made(_: torch.Tensor, index: int = index) -> None:
            ended.append((index, host.now - started))

        parameter.register_post_accumulate_grad_hook(gradient_made)
    loss = forward(model)
    assert host.now - started == pytest.approx(FORWARD_S)
    loss.backward()
    assert [index for index, _ in sorted(ended, key=lambda e: e[1])][:2] == [3, 2]
    assert dict(ended) == pytest.approx({3: 5.5, 2: 11.5, 0: 13.5, 1: 13.5})
    assert model.clock.free_at - started == pytest.approx(STEP_S)
    assert model.clock.idle_s == 0


def test_a_layer_without_arrays_is_computed_too(host: Host) -> None:
    outside = Layer(name="input", sizes_elems=(), forward_s=0.25, backward_s=0.125)
    model = EmulatedModel([outside, *LAYERS])
    started = host.now
    loss = forward(model)
    assert host.now - started == pytest.approx(0.25 + FORWARD_S)
    loss.backward()
    assert host.now - started == pytest.approx(0.25 + STEP_S + 0.125)
    assert len(list(model.parameters())) == 4


def test_a_slow_host_does_not_stretch_the_step(host: Host) -> None:
    model = EmulatedModel(LAYERS)
    started = model.clock.free_at
    delay_host(model, 1, host, 0.7)  # less than layer 1 takes: made up for at once
    forward(model).backward()
    model.end_backward()
    assert model.clock.free_at - started == pytest.approx(STEP_S)
    assert host.now == pytest.approx(model.clock.free_at)
    assert model.clock.idle_s == 0


def test_a_host_that_is_late_at_the_end_does_not_stretch_the_step_either(host: Host) -> None:
    model = EmulatedModel(LAYERS)
    started = model.clock.free_at
    delay_host(model, 2, host, 60.0)  # more than all that comes after it
    forward(model).backward()
    model.end_backward()
    assert model.clock.free_at - started == pytest.approx(STEP_S)
    assert model.clock.idle_s == 0


def test_a_late_parameter_makes_the_device_idle(host: Host) -> None:
    model = EmulatedModel(LAYERS)
    make_late(model, 1, host, 2.5)
    started = model.clock.free_at
    forward(model).backward()
    model.end_backward()
    assert model.clock.idle_s == pytest.approx(2.5)
    assert model.clock.free_at - started == pytest.approx(STEP_S + 2.5)


def test_a_parameter_that_comes_while_the_device_still_works_costs_nothing(host: Host) -> None:
    """The host runs ahead of the device by ``early_s``, and waits for less than that."""
    model = EmulatedModel(LAYERS)
    make_late(model, 0, host, 2.5)
    model.clock.free_at += 4.0
    forward(model)
    assert model.clock.idle_s == 0
    assert model.clock.free_at == pytest.approx(100.0 + 4.0 + FORWARD_S)


def test_a_parameter_is_looked_up_in_no_time(host: Host) -> None:
    """Shorter than any wait for the network: the host's own time, which does not count."""
    model = EmulatedModel(LAYERS)
    make_late(model, 1, host, 0.0004)
    started = model.clock.free_at
    forward(model)
    assert model.clock.idle_s == 0
    assert model.clock.free_at - started == pytest.approx(FORWARD_S)


def test_the_wait_at_the_end_of_backward_counts(host: Host) -> None:
    model = EmulatedModel(LAYERS)
    started = model.clock.free_at
    forward(model).backward()
    host.now += 3.0  # DistributedDataParallel waits here for the last bucket
    model.end_backward()
    assert model.clock.idle_s == pytest.approx(3.0)
    assert model.clock.free_at - started == pytest.approx(STEP_S + 3.0)


def test_restart_forgets_the_pause(host: Host) -> None:
    model = EmulatedModel(LAYERS)
    host.now += 1000.0
    model.clock.restart()
    assert model.clock.free_at == host.now
    assert model.clock.idle_s == 0


def test_occupies_real_time() -> None:
    model = EmulatedModel([Layer(name="a", sizes_elems=(1,), forward_s=0.02, backward_s=0.04)])
    started = accelerator.time.monotonic()
    model.clock.restart()
    forward(model).backward()
    assert accelerator.time.monotonic() - started >= 0.06


def test_jitter_is_drawn_anew_and_leaves_the_mean(host: Host) -> None:
    layer = Layer(name="a", sizes_elems=(1,), forward_s=1.0, backward_s=1.0)
    draws = [Unevenness(jitter=0.2).draw([layer], [rank], nodes=5) for rank in (3, 3, 4)]
    models = [EmulatedModel([layer], draw) for draw in draws]
    taken = []
    for step in range(1000):
        models[0].begin_step(step)
        for seconds in (layer_of(models[0], 0).forward_s, layer_of(models[0], 0).backward_s):
            before = models[0].clock.free_at
            models[0].clock.occupy(seconds)
            taken.append(models[0].clock.free_at - before)
    assert 0.8 <= min(taken) < 0.81
    assert 1.19 < max(taken) <= 1.2
    assert sum(taken) / len(taken) == pytest.approx(1.0, abs=0.01)
    again, other = models[1:]
    again.begin_step(0)
    other.begin_step(0)
    assert layer_of(again, 0).forward_s == pytest.approx(taken[0])
    assert layer_of(other, 0).forward_s != layer_of(again, 0).forward_s


class Operand:
    """What an operation is made on: one call takes 2 us, and some take longer, asleep or not."""

    def __init__(self, host: Ticking) -> None:
        self.calls = 0
        self.sleeps = 0
        self._host = host

    def add_(self, _: float) -> None:
        self.calls += 1
        self._host.now += 2e-6
        if self.calls % 100 == 0:  # another thread has the lock, and keeps it
            self._host.now += 0.5e-3
            self.sleeps += 1
        if self.calls % 100 == 50:  # another process has the processor
            self._host.now += 0.1e-3


class Ticking(Host):
    """A host on which looking at the clock takes time, as it must where somebody waits for it."""

    def monotonic(self) -> float:
        self.now += 1e-7
        return self.now


@pytest.fixture
def operand(monkeypatch: pytest.MonkeyPatch) -> Operand:
    host = Ticking()
    made = Operand(host)
    monkeypatch.setattr(accelerator, "time", host)
    monkeypatch.setattr(accelerator, "_sleeps", lambda: made.sleeps)
    return made


def launching(operand: Operand) -> Launches:
    launches = Launches(8e-6)
    launches._operand = operand  # type: ignore[assignment]
    launches._call_s = 2e-6
    return launches


def test_launching_is_part_of_what_a_layer_takes(operand: Operand) -> None:
    host = operand._host
    layers = [
        replace(each, forward_s=each.forward_s / 1000, backward_s=each.backward_s / 1000)
        for each in LAYERS
    ]
    model = EmulatedModel(layers, launches=launching(operand))
    model.clock.restart()
    started, slept = host.now, list[float]()
    sleep: Callable[[float], None] = host.sleep
    host.sleep = lambda seconds: (slept.append(seconds), sleep(seconds))[1]  # type: ignore[method-assign]
    forward(model).backward()
    step_s = STEP_S / 1000
    assert operand.calls == pytest.approx(0.2 * step_s / 8e-6, abs=2 * len(LAYERS))
    # what waited for the interpreter stretches the step, what waited for a processor does not
    assert model.clock.held_s == pytest.approx(3 * 0.5e-3, rel=0.01)
    assert model.clock.free_at - started == pytest.approx(step_s + model.clock.held_s)
    assert host.now == pytest.approx(model.clock.free_at)
    assert model.clock.idle_s == 0
    made_up_s = 3 * 0.1e-3
    assert sum(slept) == pytest.approx(0.8 * step_s - made_up_s, rel=0.02)


def test_an_idle_interpreter_leaves_a_pass_its_time(operand: Operand) -> None:
    launches = launching(operand)
    started = operand._host.now
    assert launches.make(49.5 * 8e-6 / 0.2) == 0.0
    assert operand.calls == 49
    assert operand._host.now - started == pytest.approx(49 * 8e-6, rel=0.05)


def test_a_step_takes_the_profiles_time_and_what_it_waited_for_the_interpreter() -> None:
    layer = Layer(name="a", sizes_elems=(1,), forward_s=0.02, backward_s=0.04)
    model = EmulatedModel([layer], launches=Launches(8e-6))
    model.clock.restart()
    started = model.clock.free_at
    forward(model).backward()
    assert model.clock.free_at - started == pytest.approx(0.06 + model.clock.held_s)
    assert accelerator.time.monotonic() >= model.clock.free_at


def test_a_thread_that_keeps_the_interpreter_holds_up_launching() -> None:
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=count)
    launches, held_s = Launches(8e-6), 0.0
    thread.start()
    try:
        while held_s < sys.getswitchinterval():
            held_s += launches.make(0.1)
    finally:
        ended.set()
        thread.join()


@pytest.mark.alone
def test_on_an_idle_thread_a_step_takes_no_longer_than_the_profile_says() -> None:
    layer = Layer(name="a", sizes_elems=(1,), forward_s=0.1, backward_s=0.2)
    model = EmulatedModel([layer] * 3, launches=Launches(8e-6))
    forward(model).backward()
    model.clock.restart()
    started = accelerator.time.monotonic()
    for _ in range(3):
        forward(model).backward()
    assert 2.7 <= accelerator.time.monotonic() - started < 2.8
    assert model.clock.held_s < 0.01 * 0.2 * 2.7
