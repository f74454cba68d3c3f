"""`torch.compile`: correct, waiting at the entry, compiled once (issue point 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import foreprop
from tests.cluster import worlds
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    build_seeded,
    check_same_bits,
    make_batches,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases

# dynamo itself looks at the .grad of its inputs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

STEPS = 12  # more than dynamo's recompile limit


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, normed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs) if normed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class _Net(nn.Module):
    """torch.compile leaves torch's own classes alone, so these are ours."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.first = _Block(5, 6, normed)
        self.second = _Block(6, 3, normed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _plain() -> nn.Module:
    return _Net()


def _normed() -> nn.Module:
    return _Net(normed=True)


class _Compiler:
    """Compiles in one of the ways that there are; returns what the loop calls."""

    def __init__(self, **options: Any) -> None:
        self.options = {"backend": "eager", **options}

    def whole(self, model: nn.Module) -> Any:
        return torch.compile(model, **self.options)

    def method(self, model: nn.Module) -> Any:
        model.compile(**self.options)
        return model

    def function(self, model: nn.Module) -> Any:
        return torch.compile(lambda x: model(x), **self.options)

    def submodules(self, model: Any) -> Any:
        for name, module in list(model.named_children()):
            setattr(model, name, torch.compile(module, **self.options))
        return model

    def submodule_methods(self, model: Any) -> Any:
        for module in model.children():
            module.compile(**self.options)
        return model


def _train(
    model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> list[float]:
    """Trains, and evaluates now and then."""
    scores = []
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()
        if number % 5 == 2:
            model.eval()
            with torch.no_grad():
                scores.append(call(x).sum().item())
            model.train()
    return scores


def _compare(way: str, when: str, make: Any = _plain, **options: Any) -> None:
    batches = make_batches(STEPS)
    compiler = _Compiler(**options)
    model, optimizer = build_seeded(with_sgd(make))
    wanted_scores = _train(model, getattr(compiler, way)(model), optimizer, batches)
    wanted = {k: v.clone() for k, v in model.state_dict().items()}
    wanted_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()

    model, optimizer = build_seeded(with_sgd(make))
    call = getattr(compiler, way)(model) if when == "before" else None
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        if call is None:
            call = getattr(compiler, way)(model)
        scores = _train(model, call, optimizer, batches)
        graphs = counters["stats"]["unique_graphs"]
        assert scores == wanted_scores
        check_same_bits(model.state_dict(), wanted)
    assert not counters["graph_break"]
    assert graphs <= wanted_graphs + 1  # one more: the first step has a hook of its own


@pytest.mark.parametrize(
    ("way", "when", "make"),
    few(
        ["submodules", *long_cases("whole", "method", "function", "submodule_methods")],
        ["before", *long_cases("after")],
        [_normed, *long_cases(_plain)],
    ),
)
def test_every_way_to_compile(way: str, when: str, make: Any) -> None:
    _compare(way, when, make, fullgraph=when == "before")


def test_the_compiled_model_itself_is_parallelized() -> None:
    batches = make_batches(STEPS)
    model, optimizer = build_seeded(with_sgd(_normed))
    wanted = torch.compile(model, backend="eager")
    wanted_scores = _train(wanted, wanted, optimizer, batches)
    model, optimizer = build_seeded(with_sgd(_normed))
    compiled = torch.compile(model, backend="eager")
    with foreprop.parallelize(compiled, optimizer, world=worlds(1)[0]):
        assert _train(compiled, compiled, optimizer, batches) == wanted_scores
        check_same_bits(compiled.state_dict(), wanted.state_dict())
    assert not counters["graph_break"]


@pytest.mark.long
def test_aot_autograd() -> None:
    _compare("whole", "before", _normed, backend="aot_eager")


@pytest.mark.timeout(300)
def test_inductor() -> None:
    """The one slow test: calls the C++ compiler."""
    _compare("whole", "after")


def test_compiled_code_of_others_does_not_disturb_a_step() -> None:
    """A compiled loss function is entered while gradients of another model are under way."""
    loss = torch.compile(F.cross_entropy, backend="eager")
    first, first_optimizer = build_seeded(with_sgd())
    second, second_optimizer = build_seeded(with_sgd())
    wanted, wanted_optimizer = build_seeded(with_sgd())
    batches = make_batches(5)
    train_classifier(wanted, wanted_optimizer, batches)
    (world,) = worlds(1)
    with (
        foreprop.parallelize(first, first_optimizer, world=world),
        foreprop.parallelize(second, second_optimizer, world=world),
    ):
        for x, y in batches:
            for optimizer in (first_optimizer, second_optimizer):
                optimizer.zero_grad()
            loss(first(x), y).backward()
            loss(second(x), y).backward()
            first_optimizer.step()
            second_optimizer.step()
        check_same_bits(first.state_dict(), wanted.state_dict())
        check_same_bits(second.state_dict(), wanted.state_dict())


def test_the_entry_is_given_back() -> None:
    import torch._dynamo.eval_frame as eval_frame

    before = eval_frame.install_generation_tagging_init
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        assert eval_frame.install_generation_tagging_init is not before
    assert eval_frame.install_generation_tagging_init is before
