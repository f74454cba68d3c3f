"""TorchScript never reads a parameter before its update is there."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.session.composition import connect
from foreprop.session.session import ConnectedSession
from tests.cluster import run_cluster, worlds
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    check_close,
    check_same_bits,
    make_batches,
    merge,
)
from tests.tiers import long_cases

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning"
)

RING = Config.resolve().architecture == "ring"
UPDATES = ["servers"] if RING else ["servers", *long_cases("workers")]
SLOW: dict[str, Any] = {} if RING else {"link_rate_bits_per_s": 30_000}
"""A step's values take some 0.1 s: who does not wait for them reads old ones."""

WIDTH = 24


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(x, weight, bias))


def _stack(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight.t())
    return x


@functools.cache
def _scripted(function: Callable[..., torch.Tensor]) -> Any:
    return torch.jit.script(function)


class _Sized(nn.Module):
    """Two layers that a reader runs in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.second = nn.Linear(WIDTH, 3)


class _Eager(_Sized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class _ByFunction(_Sized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(_scripted(_linear)(x, self.first.weight, bias=self.first.bias))


class _ByList(_Sized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _scripted(_stack)(x, [self.first.weight, self.second.weight])


class _ScriptedPart(_Sized):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(self.first)

    forward = _Eager.forward


class _TracedPart(_Sized):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.trace(self.first, torch.zeros(6, 5))

    forward = _Eager.forward


READERS: dict[str, Callable[[], nn.Module]] = {
    "script": lambda: torch.jit.script(_Eager()),
    "trace": lambda: torch.jit.trace(_Eager(), torch.zeros(6, 5)),
    "function": _ByFunction,
    "list": _ByList,
    "scripted part": _ScriptedPart,
    "traced part": _TracedPart,
}


def _build(make: Callable[[], nn.Module]) -> Any:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    return build


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> list[float]:
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _open(
    world: World, build: Any, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer, ConnectedSession]:
    """A session with servers, whatever `parallelize` does in a world of one."""
    model, optimizer = build_seeded(build, seed=world.rank)
    return (
        model,
        optimizer,
        connect(model, optimizer, Config.resolve(**SLOW, **settings), world=world),
    )


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    "reader", ["script", "function", "list", *long_cases("trace", "scripted part", "traced part")]
)
def test_a_world_of_one_has_the_bits_of_plain_pytorch(reader: str, update: str) -> None:
    batches = make_batches(4)
    _train(*build_seeded(_build(READERS[reader])), batches)  # its profiler has seen all: same bits
    plain, plain_optimizer = build_seeded(_build(READERS[reader]))
    wanted = _train(plain, plain_optimizer, batches)
    model, optimizer, session = _open(worlds(1)[0], _build(READERS[reader]), update=update)
    with session:
        assert _train(model, optimizer, batches) == wanted
        check_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("reader", [next(iter(READERS)), *long_cases(*list(READERS)[1:])])
def test_a_world_of_two_is_one_process_with_all_the_data(reader: str) -> None:
    by_rank = batches_of(2, count=4)
    plain, plain_optimizer = build_seeded(_build(READERS[reader]))
    _train(plain, plain_optimizer, merge(by_rank))

    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer, session = _open(world, _build(READERS[reader]))
        with session:
            _train(model, optimizer, by_rank[world.rank])
            return {name: value.clone() for name, value in model.state_dict().items()}

    first, second = run_cluster(2, work)
    check_same_bits(second, first)
    check_close(first, plain.state_dict())


def _saved_and_loaded(scripted: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)(torch.ones(6, 5))


def _on_buffer(scripted: Any) -> torch.Tensor:
    return torch.jit.load(io.BytesIO(scripted.save_to_buffer()))(torch.ones(6, 5))


def _evaluated(model: Any) -> Any:
    return torch.jit.script(model).eval()


LEAVING: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "jit.save": lambda model: _saved_and_loaded(model.scripted),
    "save_to_buffer": lambda model: _on_buffer(model.scripted),
    "freeze": lambda model: torch.jit.freeze(model.scripted.eval())(torch.ones(6, 5)),
    "optimize_for_inference": lambda model: torch.jit.optimize_for_inference(model.scripted.eval())(
        torch.ones(6, 5)
    ),
    "deepcopy": lambda model: model.scripted.__copy__()(torch.ones(6, 5)),
    "frozen before": lambda model: model.frozen(torch.ones(6, 5)),
    "script": lambda model: torch.jit.script(model.eager)(torch.ones(6, 5)),
    "trace": lambda model: torch.jit.trace(model.eager, torch.ones(6, 5))(torch.ones(6, 5)),
}


class _Leaving(nn.Module):
    """An eager model, and scripted ones that have the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.eager = _Eager()
        self.__dict__["scripted"] = torch.jit.script(self.eager)
        frozen = torch.jit.freeze(torch.jit.script(self.eager).eval(), optimize_numerics=False)
        self.__dict__["frozen"] = frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.eager(x)


@pytest.mark.parametrize(
    "way",
    [
        *("jit.save", "freeze", "frozen before"),
        *long_cases("save_to_buffer", "optimize_for_inference", "deepcopy", "script", "trace"),
    ],
)
def test_what_is_saved_or_frozen_is_the_last_steps(way: str) -> None:
    batches = make_batches(3)
    plain, plain_optimizer = build_seeded(_build(_Leaving))
    _train(plain, plain_optimizer, batches)
    wanted = LEAVING[way](plain)
    model, optimizer, session = _open(worlds(1)[0], _build(_Leaving), update="servers")
    with session:
        _train(model, optimizer, batches)
        assert torch.equal(LEAVING[way](model), wanted)


def test_the_entries_are_given_back() -> None:
    script: Any = torch._C
    before = (script.ScriptFunction.__call__, script.ScriptMethod.__call__, script._freeze_module)
    with _open(worlds(1)[0], _build(_Eager))[2]:
        assert script.ScriptMethod.__call__ is not before[1]
    after = (script.ScriptFunction.__call__, script.ScriptMethod.__call__, script._freeze_module)
    assert after == before


def test_an_unrelated_script_leaves_parameters_pending() -> None:
    """Only what the code can reach is waited for: a scripted activation costs no overlap."""
    activation = torch.jit.script(lambda_like)
    model, optimizer, session = _open(worlds(1)[0], _build(_Eager), update="servers")
    with session:
        _train(model, optimizer, make_batches(3))
        waits = session.stats()["waits"]
        activation(torch.ones(3))
        assert session.stats()["waits"] == waits
        assert foreprop.params.waiting.is_waiting(model.get_parameter("first.weight"))


def lambda_like(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)
