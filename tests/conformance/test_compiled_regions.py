"""In compiled code each parameter waits at its first use, and each gradient leaves when it is done.

`test_compile.py` has the ways to compile. Here a layer of the model looks around while the graph
runs: which parameters have been waited for, and which gradients are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import ConfigError
from foreprop.features.compiled import tracing
from foreprop.features.compiled.operators import running
from foreprop.session.composition import connect
from tests.cluster import worlds
from tests.conformance.graph_looks import look, looks
from tests.conformance.parity import Batch, check_same_bits, make_batches
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


class _Layer(nn.Linear):
    """torch.compile leaves torch's own classes alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Layer(5, 6)
        self.second = _Layer(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(look(torch.tanh(self.first(x))))


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

    def look_around() -> None:
        assert running.forward is not None
        waiting: Any = running.forward
        seen.append({names[id(item.parameter)] for item in waiting.waiting()})

    call = torch.compile(model, backend=backend, fullgraph=True)
    batches = make_batches(6)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        _train(call, optimizer, batches[:2])
        graphs = counters["stats"]["unique_graphs"]
        looks["forward"] = look_around
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

        def look_around() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                there = [name for name, p in model.named_parameters() if p.grad is not None]
            seen.append((sorted(there), session.stats()["pushed_bytes"]))

        _train(call, optimizer, batches[:2])
        looks["backward"] = look_around
        before = session.stats()["pushed_bytes"]
        _train(call, optimizer, batches[2:3])
    assert seen[0][0] == ["second.bias", "second.weight"]
    assert seen[0][1] >= before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_is_pushed_while_the_backward_graph_runs(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer's have left for the servers before the first layer's are computed."""
    model, optimizer = _seeded()
    names = [name for name, _ in model.named_parameters()]
    pushed: list[str] = []
    seen: list[list[str]] = []
    push = WorkerEngine.push

    def noted(engine: WorkerEngine, number: int, *args: Any, **options: Any) -> None:
        pushed.append(names[number])
        push(engine, number, *args, **options)

    monkeypatch.setattr(WorkerEngine, "push", noted)
    call = torch.compile(model, backend=backend, fullgraph=True)
    config = Config(slice_elems=3)  # too small for two parameters to share one
    with connect(model, optimizer, config, world=worlds(1)[0]):
        _train(call, optimizer, make_batches(2))
        looks["backward"] = lambda: seen.append(sorted(pushed))
        for batch in make_batches(4):
            pushed.clear()
            _train(call, optimizer, [batch])
            assert sorted(pushed) == sorted(names)
    assert seen == [["second.bias", "second.weight"]] * 4


def test_hooks_of_others_run_once_in_each_pass() -> None:
    """Autograd runs them for the None that it gets in a gradient's place, too."""
    model, optimizer = _seeded()
    ran: list[str] = []

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: ran.append(name)

    parameters = dict(model.named_parameters())
    handles = [p.register_post_accumulate_grad_hook(hook(n)) for n, p in parameters.items()]
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        for batch in make_batches(4):
            ran.clear()
            _train(call, optimizer, [batch])
            assert sorted(ran) == sorted(parameters)
        for handle in handles:
            handle.remove()
        ran.clear()
        _train(call, optimizer, make_batches(1))
    assert ran == []


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
@pytest.mark.parametrize("loop", [_accumulate, *long_cases(_train)])
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


# Code that is not compiled beside code that is.
def _compare(
    make: Callable[[], nn.Module],
    compiled: Callable[[Any], Any],
    loop: Callable[[Any, Any, torch.optim.Optimizer, Sequence[Batch]], None] | None = None,
    *,
    run_before: bool = False,
) -> None:
    """The same bits in a session as without one."""
    batches = make_batches(6)

    def train(model: Any, optimizer: torch.optim.Optimizer, call: Any) -> None:
        if loop is None:
            _train(call, optimizer, batches)
        else:
            loop(model, call, optimizer, batches)

    model, optimizer = _seeded(make)
    train(model, optimizer, compiled(model))
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    torch._dynamo.reset()
    model, optimizer = _seeded(make)
    call = compiled(model)
    if run_before:
        F.cross_entropy(call(batches[0][0]), batches[0][1]).backward()
        optimizer.zero_grad()
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train(model, optimizer, call)
        check_same_bits(model.state_dict(), wanted)


def _aot(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def _aot_parts(model: Any) -> Any:
    return _regional(model, "aot_eager")


class _Broken(_Net):
    """The graph breaks, and code between its parts uses parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        scale = float(self.second.bias.detach().abs().sum())
        return self.second(x * (1.0 + scale))


class _Disabled(_Net):
    """A layer is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.second.forward = torch._dynamo.disable(self.second.forward)  # type: ignore[method-assign]


class _Tied(nn.Module):
    """Two regions, and code that is not compiled, share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _Layer(5, 5)
        self.second = _Layer(5, 5)
        self.second.weight = self.first.weight
        self.last = _Layer(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.tanh(self.first(x)))) + self.first.bias[:3]


class _Twice(nn.Module):
    """One region is entered twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _Layer(5, 5)
        self.last = _Layer(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(torch.tanh(self.first(x)))))


class _Blocks(nn.Module):
    """Blocks that share their code, so also what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second", "third"):
            setattr(self, name, _Layer(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = torch.tanh(part(x))
        return x


class _Own(nn.Parameter):
    """Another library's parameter: it has a class of its own."""


class _Odd(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight = _Own(self.first.weight.detach())


@pytest.mark.parametrize("run_before", [True, *long_cases(False)])
@pytest.mark.parametrize("make", [_Broken, *long_cases(_Disabled, _Odd)])
def test_beside_other_code(make: Any, run_before: bool) -> None:
    _compare(make, _aot, run_before=run_before)


@pytest.mark.long
@pytest.mark.parametrize("run_before", [True, False])
@pytest.mark.parametrize("make", [_Tied, _Twice, _Blocks])
def test_several_regions(make: Any, run_before: bool) -> None:
    _compare(make, _aot_parts, run_before=run_before)


@pytest.mark.long
def test_blocks_share_what_is_compiled() -> None:
    """As many graphs as without a session."""
    model, optimizer = _seeded(_Blocks)
    _train(_aot_parts(model), optimizer, make_batches(5))
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    model, optimizer = _seeded(_Blocks)
    call = _aot_parts(model)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        _train(call, optimizer, make_batches(5))
    assert counters["stats"]["unique_graphs"] == graphs


# Gradients that autograd is asked for in other ways.
def _by_hook(model: Any, call: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    """A hook changes a gradient before it is accumulated."""
    handle = model.second.weight.register_hook(lambda gradient: gradient * 2)
    _train(call, optimizer, batches)
    handle.remove()


def _by_grad(model: Any, call: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    """They are only computed, and put where they belong by hand."""
    parameters = list(model.parameters())
    for x, y in batches:
        gradients = torch.autograd.grad(F.cross_entropy(call(x), y), parameters)
        assert all(gradient is not None for gradient in gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def _twice_through(model: Any, call: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    """One graph, two backward passes."""
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def _of_some(model: Any, call: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    """A backward pass that ends at some parameters."""
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward(inputs=list(model.second.parameters()))
        assert model.first.weight.grad is None
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*donated:UserWarning")
@pytest.mark.parametrize("loop", [_by_hook, *long_cases(_by_grad, _twice_through, _of_some)])
def test_gradients_that_are_asked_for_in_other_ways(loop: Any) -> None:
    with torch._functorch.config.patch(donated_buffer=False):  # as torch says for two passes
        _compare(_Net, _aot, loop)


# The rest.
def test_compiled_code_in_another_thread() -> None:
    """It waits, as any other code does in any thread."""
    model, optimizer = _seeded()
    call = _aot(model)
    batches = make_batches(4)
    scores: list[torch.Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            scores.append(call(batches[0][0]))

    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        _train(call, optimizer, batches)
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join(60)
        with torch.no_grad():
            assert torch.equal(scores[0], model(batches[0][0]))


@pytest.mark.parametrize("backend", ["inductor", "cudagraphs"])
def test_cuda_graphs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(tracing, "_on_gpu", lambda tensors: True)
    model, optimizer = _seeded()
    mode = "reduce-overhead" if backend == "inductor" else None
    call = torch.compile(model, backend=backend, mode=mode)
    x, _ = make_batches(1)[0]
    with (
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
        pytest.raises(ConfigError, match="mode='max-autotune-no-cudagraphs'"),
    ):
        call(x)


def test_a_trace_breaks_no_graph(tmp_path: Path) -> None:
    """Hooks that record a forward pass by layer are not there for the compiler."""
    model, optimizer = _seeded()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], trace=str(tmp_path)):
        _train(call, optimizer, make_batches(3))
    (path,) = tmp_path.glob("worker-0.*.trace.json")
    text = path.read_text()
    assert '"backward"' in text
    assert '"forward"' not in text


def test_what_is_replaced_is_given_back() -> None:
    from torch._dynamo import convert_frame, guards, output_graph
    from torch._dynamo.backends import common

    def now() -> list[Any]:
        return [
            convert_frame.ConvertFrameAssert.__call__,
            guards.GuardBuilder.TENSOR_MATCH,
            output_graph.OutputGraph._call_user_compiler,
            common.aot_module_simplified,
            torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
        ]

    before = now()
    model, optimizer = _seeded()
    call = _aot(model)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        call(make_batches(1)[0][0])
        assert not any(a is b for a, b in zip(before, now(), strict=True))
    assert now() == before


@pytest.mark.long
def test_compiled_autograd() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        _compare(_Net, _aot)


@pytest.mark.long
def test_a_model_is_exported_as_without_a_session() -> None:
    """Nothing of ours is in it, and it shows the last step."""
    model, optimizer = _seeded()
    call = _aot(model)
    batches = make_batches(4)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        _train(call, optimizer, batches)
        exported = torch.export.export(model, (batches[0][0],))
        _train(call, optimizer, batches[:1])
        _train(call, optimizer, batches[:1])
        again = torch.export.export(model, (batches[0][0],), strict=True)
        with torch.no_grad():
            assert torch.equal(again.module()(batches[0][0]), model(batches[0][0]))
    assert "await_values" not in str(exported.graph) + str(again.graph)
