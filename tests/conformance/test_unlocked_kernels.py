"""While inductor's kernels for CPUs compute, the session's other threads run."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.codecache import CppPythonBindingsCodeCache

import foreprop
from foreprop.features.compiled import inductor
from tests.cluster import worlds

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # inductor's
]

_ELEMS, _OPERATIONS = 1_000_000, 40
_LOOK_S = 0.001
_FEW = 10
"""Times that another thread has run by chance, between two kernels."""

_marks: list[int] = []
_turns = [0]


@torch.library.custom_op("foreprop_tests::mark", mutates_args=())
def _mark(x: torch.Tensor) -> torch.Tensor:
    _marks.append(_turns[0])
    return x.clone()


@_mark.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_mark.register_autograd(lambda ctx, gradient: _mark(gradient))


class _Net(nn.Module):
    """One long fused kernel between two marks, in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _mark(x * self.weight)
        for _ in range(_OPERATIONS):
            y = torch.sin(y) * self.weight
        result: torch.Tensor = _mark(y)
        return result


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def _taking_turns() -> Iterator[None]:
    """A thread counts in `_turns` how often it runs; nobody takes the lock from who keeps it."""
    stopped = threading.Event()

    def count() -> None:
        while not stopped.wait(_LOOK_S):
            _turns[0] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        stopped.set()
        thread.join()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_other_threads_run_while_a_kernel_computes() -> None:
    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call: Any = torch.compile(model, backend="inductor", fullgraph=True)
    x = torch.linspace(0.0, 1.0, _ELEMS)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        for _ in range(3):
            _marks.clear()
            with _taking_turns():
                optimizer.zero_grad()
                call(x).sum().backward()
                optimizer.step()
    before, after, before_back, after_back = _marks
    assert after - before > _FEW
    assert after_back - before_back > _FEW


def test_bindings_are_those_that_are_known_and_are_given_back() -> None:
    before = CppPythonBindingsCodeCache.call_entry_function
    assert before == inductor._LOCKED
    with inductor.unlocked_kernels():
        with inductor.unlocked_kernels():
            assert CppPythonBindingsCodeCache.call_entry_function != before
        written = CppPythonBindingsCodeCache.call_entry_function.format("parse(0), parse(1)")
        assert "}(parse(0), parse(1)); Py_RETURN_NONE;" in written
    assert CppPythonBindingsCodeCache.call_entry_function == before


def test_bindings_of_another_torch_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "kernel({}); return nullptr;"
    monkeypatch.setattr(CppPythonBindingsCodeCache, "call_entry_function", other)
    with inductor.unlocked_kernels():
        assert CppPythonBindingsCodeCache.call_entry_function == other
