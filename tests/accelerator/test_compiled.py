"""Compiled by inductor, for a real accelerator: the bits of the same code without foreprop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import solitary_world
from foreprop.errors import ConfigError
from tests.accelerator.here import device_or_skip

DEVICE = device_or_skip()
STEPS = 4

pytestmark = [
    pytest.mark.leaks_ok("the compiler's own threads and processes"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(64),
            nn.Linear(64, 128),
            nn.Linear(128, 64),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(F.gelu(self.first(self.norm(x))))
        return result


def _perceptron() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 10))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


MODELS = {"perceptron": _perceptron, "convolutions": _convolutions}


def _train(make: Any, how: str, settings: dict[str, Any] | None, **options: Any) -> list[Any]:
    """``settings``: of a session; None: torch alone."""
    torch.manual_seed(0)
    model = make().to("cpu")
    model(torch.randn(2, 64))
    model = model.to(DEVICE)
    batches = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if settings is None:
        return _loop(model, optimizer, batches, how, options)
    with foreprop.parallelize(
        model, optimizer, world=solitary_world(), architecture="p2p", slice_elems=500, **settings
    ):
        return _loop(model, optimizer, batches, how, options)


def _loop(model: Any, optimizer: Any, batches: Any, how: str, options: Any) -> list[Any]:
    call = torch.compile(model, **options) if how == "whole" else model
    for block in model if how == "blocks" else ():
        block.compile(**options)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(call(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
    return [value.detach().cpu().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("how", ["blocks", "whole"])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_bits_of_the_same_code_without_foreprop(name: str, how: str) -> None:
    wanted = _train(MODELS[name], how, None)
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    got = _train(MODELS[name], how, {"update": "workers"})
    assert graphs <= counters["stats"]["unique_graphs"] <= graphs + 1  # docs/compile.md
    assert all(map(torch.equal, got, wanted))
    torch._dynamo.reset()
    for ours, theirs in zip(_train(MODELS[name], how, {"update": "servers"}), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only CUDA and ROCm have such graphs")
def test_replayed_graphs_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="mode='max-autotune-no-cudagraphs'"):
        _train(_perceptron, "whole", {"update": "workers"}, mode="reduce-overhead")
