"""Weights of convolutions wait at their first use, however a compiler lays them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn import functional as F

import foreprop
from foreprop.features.compiled import regions
from foreprop.features.compiled.operators import running
from tests.cluster import worlds
from tests.conformance.graph_looks import look, looks
from tests.conformance.parity import Batch, build_seeded, check_same_bits
from tests.tiers import long_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # inductor's
]

BACKENDS = ["aot_eager", *long_cases("inductor")]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    looks.clear()
    yield
    looks.clear()
    torch._dynamo.reset()


class _Net(nn.Module):
    """Convolutions of all kinds; inductor copies the weights of most, and views some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2, padding=1)
        self.again = nn.Conv2d(8, 8, 3, groups=2, padding=1)
        self.again.weight = self.grouped.weight
        self.transposed = nn.ConvTranspose2d(8, 8, 3)
        self.point = nn.Conv2d(8, 8, 1)
        self.scale = nn.Parameter(torch.rand(1, 8, 1, 1))
        self.places = nn.Parameter(torch.rand(1, 8, 8, 8))
        self.standardised = nn.Conv2d(8, 8, 3)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = look(torch.relu(self.norm(self.first(x)) * self.places))
        x = look(torch.relu(self.again(torch.relu(self.grouped(x)))))
        x = look(torch.relu(self.transposed(x)))
        x = x + self.scale * self.point(x) + self.transposed.weight.square().mean()
        weight = self.standardised.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) * 2.0
        x = F.conv2d(x, weight, self.standardised.bias)
        result: torch.Tensor = self.last(x.mean((2, 3)))
        return result


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 10, 10, generator=generator), torch.tensor([0, 1, 2, 1]))
        for _ in range(count)
    ]


def _train(call: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()


def _modules(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _waiting_at_looks(model: nn.Module, compiler: Any) -> list[set[str]]:
    """In one step: the parameters that still wait, at each look."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: list[set[str]] = []

    def look_around() -> None:
        forward: Any = running.forward
        seen.append({names[id(item.parameter)] for item in forward.waiting()})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = torch.compile(model, backend=compiler, fullgraph=True)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        _train(call, optimizer, _make_batches(2))
        looks["forward"] = look_around
        _train(call, optimizer, _make_batches(1))
        looks.clear()
    return seen


LATER = {"point", "scale", "standardised", "last"}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_nothing_waits_at_the_entry(backend: str) -> None:
    """What is used behind a look still waits there, and nothing else does."""
    model, _ = build_seeded(_build)
    assert [_modules(names) for names in _waiting_at_looks(model, backend)] == [
        {"grouped", "again", "transposed"} | LATER,
        {"transposed"} | LATER,
        LATER,
    ]


def test_a_compiler_that_nobody_knows_gets_weights_that_have_waited() -> None:
    """It may copy those of four dimensions at the entry: they wait there, and no others."""

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return gm.forward

    model, _ = build_seeded(_build)
    seen = _waiting_at_looks(model, aot_autograd(fw_compiler=compiler))
    saved = {"grouped.weight", "transposed.weight"}
    behind = {"grouped", "again", "transposed"} | LATER
    parts = {name for name, _ in model.named_parameters() if name.partition(".")[0] in behind}
    assert seen[0] == parts - saved


def _compare(backend: str, memory_format: torch.memory_format) -> None:
    batches = _make_batches(5)
    results = []
    for parallel in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, optimizer = build_seeded(_build)
        model.to(memory_format=memory_format)  # type: ignore[call-overload]
        call = torch.compile(model, backend=backend, fullgraph=True)
        if parallel:
            with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
                _train(call, optimizer, batches)
                check_same_bits(model.state_dict(), results[0][0])
        else:
            _train(call, optimizer, batches)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        results.append((state, counters["stats"]["unique_graphs"]))
    assert results[0][1] == results[1][1]


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_same_bits(backend: str, memory_format: torch.memory_format) -> None:
    """As the same code compiled without foreprop, by as many compilations."""
    _compare(backend, memory_format)


class _Landing:
    """What may land in a parameter's memory, and its gradient's, once it is done: at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._run = regions.BackwardGraph.__call__
        monkeypatch.setattr(regions._BackwardRun, "is_done", lambda _, *args: self._is_done(*args))
        monkeypatch.setattr(regions.BackwardGraph, "__call__", lambda *args: self._call(*args))

    def _is_done(self, output: int, gradient: torch.Tensor) -> None:
        """The gradient takes autograd's way, at the end of the graph."""
        backward: Any = running.backward
        target = backward._targets.get(output)
        if target is not None:
            self.count += 1
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                for tensor in (target._variable.data, gradient):
                    self._kept.append((tensor, tensor.clone()))
                    tensor.fill_(float("nan"))

    def _call(self, graph: Any, args: list[Any]) -> Any:
        results = self._run(graph, args)
        for tensor, value in self._kept:
            tensor.copy_(value)
        self._kept.clear()
        return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_read_once_it_is_done(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a parameter nor its gradient is read behind the operator, in fused kernels either."""
    landing = _Landing(monkeypatch)
    _compare(backend, torch.contiguous_format)
    assert landing.count >= 5 * 10  # steps, and most of the parameters
