"""The demo's network trains as any other, and takes its emulated device's time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foreprop_lab.lab.accelerator as accelerator
from foreprop.plan import limit
from foreprop_lab.demo.network import SmallVgg, layers_of


class Time:
    """Passes only when somebody sleeps, or as it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    simulated = Time()
    monkeypatch.setattr(accelerator, "time", simulated)
    monkeypatch.setattr("foreprop_lab.demo.network.time", simulated)
    return simulated


def step(model: SmallVgg) -> None:
    images, labels = torch.ones(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])
    torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
    model.end_backward()


def test_a_step_takes_the_devices_compute(time: Time) -> None:
    model = SmallVgg(0.3)
    for number in range(1, 4):
        step(model)
        assert time.now == pytest.approx(100 + 0.3 * number)
    model.take_no_time()
    step(model)
    assert time.now == pytest.approx(100.9)


def test_gradients_come_last_layer_first_each_after_its_time(time: Time) -> None:
    model = SmallVgg(0.3)
    came: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: came.append((name, time.now - 100))
        )
    step(model)
    forward_s = sum(layer.forward_s for layer in layers_of(0.3))
    expected, at_s = [], forward_s
    for layer in reversed(layers_of(0.3)):
        at_s += layer.backward_s
        expected.append((f"{layer.name}.weight", pytest.approx(at_s)))
    assert [entry for entry in came if entry[0].endswith("weight")] == expected
    assert {name for name, _ in came} == {name for name, _ in model.named_parameters()}


def test_computing_while_the_device_is_busy_costs_nothing(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SmallVgg(0.3)
    convolve = nn.functional.conv2d

    def slow(*arguments: object, **others: object) -> torch.Tensor:
        time.now += 0.02
        result: torch.Tensor = convolve(*arguments, **others)
        return result

    monkeypatch.setattr("foreprop_lab.demo.network.functional.conv2d", slow)
    step(model)
    assert time.now == pytest.approx(100.3)


def test_it_is_the_plain_network() -> None:
    torch.manual_seed(0)
    timed = SmallVgg()
    x = torch.randn(3, 1, 28, 28)
    hidden = x
    for layer in (timed.conv1, timed.conv2):
        hidden = nn.functional.conv2d(hidden, layer.weight, layer.bias, padding=1)
        hidden = nn.functional.max_pool2d(torch.relu(hidden), 2)
    hidden = torch.relu(nn.functional.linear(hidden.flatten(1), timed.fc1.weight, timed.fc1.bias))
    plain = nn.functional.linear(hidden, timed.fc2.weight, timed.fc2.bias)
    assert torch.equal(timed(x), plain)
    sizes = [parameter.numel() for parameter in timed.parameters()]
    assert sum(sizes) * 4 == limit.model_bytes(layers_of(1.0))
