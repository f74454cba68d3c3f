"""Real layers on the emulated accelerator: what they are, and when they take its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreprop.errors import ConfigError
from foreprop.plan.limit import compute_s
from foreprop_lab.experiments.layers import models, training
from foreprop_lab.experiments.layers.models import (
    MODELS,
    NOT_COMPILED,
    RealModel,
    Timed,
    profile_of,
)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that the device was given to take, in order; nobody sleeps."""
    found: list[float] = []

    class Clock:
        def occupy(self, seconds: float) -> None:
            found.append(seconds)

    monkeypatch.setattr(models, "DEVICE", Clock())
    return found


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def timed(name: str, seconds: float = 3.0) -> RealModel:
    model = MODELS[name]()
    model.take_times(profile_of(name).layers(scale=1, compute_s=seconds))
    return model


@pytest.mark.parametrize("name", list(MODELS))
def test_a_profile_has_each_array_once_in_the_order_of_use(name: str) -> None:
    torch.manual_seed(0)
    model, profile = MODELS[name](), profile_of(name)
    shapes = {path: tuple(p.shape) for path, p in model.named_parameters()}
    assert {array.name: array.shape for array in profile.arrays} == shapes
    assert len(profile.arrays) == len(shapes)
    names = [array.name for array in profile.arrays]
    assert names[0].split(".")[0] in ("words", "stem")
    assert names[-1] == "last.layer.bias"
    layers_of_it = profile.layers(scale=1, compute_s=2.5)
    assert compute_s(layers_of_it) == pytest.approx(2.5)
    assert all(layer.backward_s == pytest.approx(2 * layer.forward_s) for layer in layers_of_it)


def test_flops_are_those_of_the_formulas() -> None:
    flops = {array.name: array.forward_flops for array in profile_of("transformer").arrays}
    assert flops["blocks.0.up.layer.weight"] == 2 * (4 * 256 * 256) * (2 * 16)
    assert flops["blocks.0.norm1.layer.weight"] == 256 * 2 * 16
    assert flops["words.layer.weight"] == 0
    flops = {array.name: array.forward_flops for array in profile_of("lstm").arrays}
    assert flops["blocks.0.layer.weight_hh_l0"] == 2 * (4 * 256 * 256) * (2 * 16)
    flops = {array.name: array.forward_flops for array in profile_of("resnet").arrays}
    assert flops["stem.layer.weight"] == 2 * (3 * 64 * 9) * (2 * 8 * 8)
    assert flops["blocks.2.conv1.layer.weight"] == 2 * (64 * 128 * 9) * (2 * 4 * 4)


def _step(model: RealModel, call: Any) -> None:
    inputs, classes = model.batch(torch.Generator().manual_seed(0))
    F.cross_entropy(call(inputs).flatten(0, -2), classes.flatten()).backward()


@pytest.mark.parametrize("name", list(MODELS))
def test_every_layer_takes_its_time_in_both_passes(name: str, taken: list[float]) -> None:
    model = timed(name)
    taken.clear()  # of the profile
    _step(model, model)
    own = [module for module in model.modules() if isinstance(module, Timed)]
    assert sorted(taken) == sorted(
        ns * 1e-9 for module in own for ns in (module.forward_ns, module.backward_ns)
    )
    assert sum(taken) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_COMPILED])
def test_compiled_code_takes_the_same_times_in_the_same_order(
    name: str, taken: list[float]
) -> None:
    model = timed(name)
    taken.clear()  # of the profile
    _step(model, model)
    eager = list(taken)
    taken.clear()
    model.zero_grad()
    _step(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert taken == eager


def test_an_unknown_model_is_named_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"^model is 'vgg19'; there are transformer, resnet, lstm$"
    ):
        training.real_profile("vgg19")


def test_blocks_of_one_kind_have_one_time() -> None:
    """So they share what is compiled."""
    model = timed("transformer")
    times = [
        [m.forward_ns for m in block.modules() if isinstance(m, Timed)] for block in model.blocks
    ]
    assert all(each == times[0] for each in times)
    assert isinstance(model.blocks[0], nn.Module)


def test_what_is_not_compiled_says_so() -> None:
    profile = training.real_profile("lstm")
    with pytest.raises(ConfigError, match=r"systems has 'whole'.*ask for eager"):
        training.LayersSetting(profile=profile, systems=("eager", "whole"))
    training.LayersSetting(profile=profile, systems=("eager", "eager+int8"))
