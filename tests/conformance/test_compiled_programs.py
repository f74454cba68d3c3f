"""Programs that compile more than a forward pass, or less: the same bits as without foreprop."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import foreprop
from tests.cluster import worlds
from tests.conformance.parity import Batch, build_seeded, check_same_bits, make_batches
from tests.tiers import long_cases

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

Program = Callable[[Any, torch.optim.Optimizer], list[torch.Tensor]]
"""Trains, and returns what else is to be the same."""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class _Layer(nn.Linear):
    """torch.compile leaves torch's own classes alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Layer(5, 6)
        self.second = _Layer(6, 3)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.hidden(x))
        return result


class _Recomputing(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=False)
        result: torch.Tensor = self.second(hidden)
        return result


def _compile(call: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(call, backend="aot_eager", **options)


def _train(call: Any, optimizer: torch.optim.Optimizer, batches: list[Batch] | None = None) -> None:
    for x, y in make_batches(5) if batches is None else batches:
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()


def _compiled_step(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's step is compiled, as PyTorch's tutorials do."""
    step = _compile(lambda: optimizer.step())
    for x, y in make_batches(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        step()
    return []


def _train_step(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All of a training step is one compiled function."""

    @_compile
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return [step(x, y) for x, y in make_batches(5)]


def _forward_and_backward(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    @_compile
    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    losses = []
    for x, y in make_batches(5):
        optimizer.zero_grad()
        losses.append(backward(x, y))
        optimizer.step()
    return losses


def _dynamic(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Batches of many sizes, one graph."""
    batches = [(x[: 2 + n], y[: 2 + n]) for n, (x, y) in enumerate(make_batches(4))]
    _train(_compile(model, dynamic=True, fullgraph=True), optimizer, batches)
    return []


def _checkpointed_region(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    compiled = _compile(model)
    _train(lambda x: checkpoint(compiled, x, use_reentrant=False), optimizer)
    return []


def _plain(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    _train(_compile(model, fullgraph=True), optimizer)
    return []


def _inference(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Between steps, without gradients."""
    compiled = _compile(model)
    seen = []
    for batch in make_batches(4):
        _train(compiled, optimizer, [batch])
        with torch.no_grad():
            seen.append(compiled(batch[0]))
        _train(compiled, optimizer, [batch])
        with torch.inference_mode():
            seen.append(compiled(batch[0]).clone())
    return seen


def _exported(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """`torch.export` in its ways, each while updates are pending."""
    x, _ = make_batches(1)[0]
    seen = []
    rows = torch.export.Dim("rows")
    for options in ({"strict": True}, {"strict": False}, {"dynamic_shapes": ({0: rows},)}):
        _train(model, optimizer)
        exported = torch.export.export(model, (x,), **options)  # type: ignore[arg-type]
        seen += [value.detach().clone() for value in exported.state_dict.values()]
        file = io.BytesIO()
        torch.export.save(exported.run_decompositions(), file)
        file.seek(0)
        seen.append(torch.export.load(file).module()(x))
    return seen


def _functional(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """`torch.func` with the model's own parameters, pending ones: gradients by hand."""

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    for x, y in make_batches(5):
        gradients = torch.func.grad(loss)(dict(model.named_parameters()), x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].detach().clone()
        optimizer.step()
    return []


def _under_vmap(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    _train(_compile(lambda x: torch.func.vmap(model)(x)), optimizer)
    return []


class _Everything(torch.overrides.TorchFunctionMode):
    """Another user of `__torch_function__`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _in_a_mode(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with _Everything():
        _train(model, optimizer)
        _train(_compile(model), optimizer)
    return []


class _Tagged(torch.Tensor):
    """A subclass of somebody's."""


def _subclass(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    _train(model, optimizer, [(x.as_subclass(_Tagged), y) for x, y in make_batches(4)])
    return []


def _with_conditions(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Graphs within the graph use parameters."""

    def call(x: torch.Tensor) -> torch.Tensor:
        ways = model.hidden, lambda x: torch.sin(model.first(x))
        result: torch.Tensor = model.second(torch.cond(x.sum() > 0, *ways, (x,)))
        return result

    _train(_compile(call, fullgraph=True), optimizer)
    return []


PROGRAMS = [
    _compiled_step,
    _functional,
    *long_cases(_train_step, _exported),
    *long_cases(_forward_and_backward, _dynamic, _checkpointed_region, _inference),
    *long_cases(_under_vmap, _in_a_mode, _subclass, _with_conditions),
]


def _each_layer(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Torch's own among them, whose frames Dynamo skips: what they call it does not."""
    for layer in model:
        layer.compile(backend="aot_eager")
    _train(model, optimizer)
    return []


def _compare(program: Program, make: Callable[[], nn.Module] = _Net, **settings: Any) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = build_seeded(build)
    wanted = program(model, optimizer)
    wanted_state = {name: value.clone() for name, value in model.state_dict().items()}
    torch._dynamo.reset()
    model, optimizer = build_seeded(build)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings):
        seen = program(model, optimizer)
        check_same_bits(model.state_dict(), wanted_state)
    assert len(seen) == len(wanted)
    for a, b in zip(seen, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_bits(program: Program) -> None:
    _compare(program)


@pytest.mark.parametrize("update", ["servers", *long_cases("workers")])
def test_layers_of_torch_that_are_compiled_one_by_one(update: str) -> None:
    _compare(_each_layer, lambda: nn.Sequential(_Layer(5, 6), nn.Linear(6, 3)), update=update)


@pytest.mark.long
def test_a_compiled_step_makes_an_ordinary_ones_updates() -> None:
    """It is not compiled: a compiled AdamW alone computes other bits than AdamW."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _Net()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    wanted, optimizer = build_seeded(build)
    _train(wanted, optimizer)
    model, optimizer = build_seeded(build)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        _compiled_step(model, optimizer)
        check_same_bits(model.state_dict(), wanted.state_dict())


@pytest.mark.long
def test_a_step_in_one_whole_graph_is_refused_by_name() -> None:
    model, optimizer = build_seeded(lambda: (net := _Net(), torch.optim.SGD(net.parameters())))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        _train(model, optimizer)
        step = _compile(lambda: optimizer.step(), fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="foreprop makes the optimizer's"):
            step()


@pytest.mark.long
@pytest.mark.parametrize("program", [_plain, _checkpointed_region])
def test_activation_checkpointing(program: Program) -> None:
    """Parameters are read a second time, in the backward pass."""
    _compare(program, _Recomputing)


@pytest.mark.long
def test_modes_of_inductor() -> None:
    def tuned(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        _train(torch.compile(model, mode="max-autotune-no-cudagraphs"), optimizer)
        return []

    _compare(tuned)
