"""The emulated accelerator on a host whose clock only the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreprop.lab import accelerator
from foreprop.lab.accelerator import EmulatedLayer, EmulatedModel
from foreprop.workload.profile import Layer, load_profile
from foreprop.workload.unevenness import Unevenness

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
