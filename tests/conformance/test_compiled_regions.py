"""Inside compiled code: each parameter waits at its first use, each gradient leaves when it is done.

`test_compile.py` has the ways to compile. Here a layer of the model looks around while the graph
runs: which parameters have been waited for, and which gradients are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import foreprop
from foreprop.compiled import tracing
from foreprop.compiled.operators import running
from foreprop.errors import ConfigError
from tests.cluster import run_cluster, worlds
from tests.conformance.parity import Batch, batches_of, check_same_bits, make_batches, merge
from tests.tiers import long_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # inductor's
]

BACKENDS = ["aot_eager", *long_cases("inductor")]

_looks: dict[str, Callable[[], None]] = {}


@torch.library.custom_op("foreprop_tests::look", mutates_args=())
def _look(x: torch.Tensor) -> torch.Tensor:
    """Calls what the test has left in `_looks`, in both directions."""
    _looks.get("forward", lambda: None)()
    return x.clone()


@torch.library.custom_op("foreprop_tests::look_back", mutates_args=())
def _look_back(x: torch.Tensor) -> torch.Tensor:
    _looks.get("backward", lambda: None)()
    return x.clone()


@_look.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@_look_back.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_look.register_autograd(lambda ctx, gradient: _look_back(gradient))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    _looks.clear()
    yield
    _looks.clear()
    torch._dynamo.reset()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(_look(torch.tanh(self.first(x))))


def _seeded(make: Callable[[], nn.Module] = _Net) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(call: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_a_parameter_waits_at_its_first_use_in_the_graph(backend: str) -> None:
    """The second layer's are still waiting when the first layer has been computed."""
    model, optimizer = _seeded()
    names, seen = _names(model), []

    def look() -> None:
        assert running.forward is not None
        waiting: Any = running.forward
        seen.append({names[id(item.parameter)] for item in waiting.waiting()})

    call = torch.compile(model, backend=backend, fullgraph=True)
    batches = make_batches(6)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        _train(call, optimizer, batches[:2])
        graphs = counters["stats"]["unique_graphs"]
        _looks["forward"] = look
        _train(call, optimizer, batches[2:])
        assert counters["stats"]["unique_graphs"] == graphs
    assert seen == [{"second.weight", "second.bias"}] * 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_leaves_while_the_backward_graph_runs(backend: str) -> None:
    """The second layer's gradients are there, and sent, before the first layer's are computed."""
    model, optimizer = _seeded()
    seen = []
    call = torch.compile(model, backend=backend, fullgraph=True)
    batches = make_batches(6)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:

        def look() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                there = [name for name, p in model.named_parameters() if p.grad is not None]
            seen.append((sorted(there), session.stats()["pushed_bytes"]))

        _train(call, optimizer, batches[:2])
        _looks["backward"] = look
        before = session.stats()["pushed_bytes"]
        _train(call, optimizer, batches[2:3])
    assert seen[0][0] == ["second.bias", "second.weight"]
    assert seen[0][1] >= before


def _whole(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def _regional(model: Any, backend: str) -> Any:
    for part in model.children():
        part.compile(backend=backend)
    return model


def _accumulate(call: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    """Two backward passes to a step, and clipping."""
    for number, (x, y) in enumerate(batches):
        F.cross_entropy(call(x), y).backward()
        if number % 2:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_value_(parameters, 0.05)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loop", [_train, _accumulate])
@pytest.mark.parametrize("compiled", [_whole, *long_cases(_regional)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_as_compiled_without_foreprop(backend: str, compiled: Any, loop: Any) -> None:
    batches = make_batches(8)
    model, optimizer = _seeded()
    loop(compiled(model, backend), optimizer, batches)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    torch._dynamo.reset()
    model, optimizer = _seeded()
    call = compiled(model, backend)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        loop(call, optimizer, batches)
        check_same_bits(model.state_dict(), wanted)
