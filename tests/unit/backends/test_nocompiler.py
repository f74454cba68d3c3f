"""Without the compiler torch's optimizers have the same bits; who needs it still gets it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from foreprop.engine.optimizer import ELEMENTWISE_OPTIMIZERS

pytestmark = pytest.mark.long  # the compiler takes seconds to import

# What three steps of each optimizer make of the same numbers, its state saved between them.
UPDATED = """
import torch
from foreprop.engine.optimizer import ELEMENTWISE_OPTIMIZERS

found = {}
for name, make in ELEMENTWISE_OPTIMIZERS.items():
    drawn = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(9, generator=drawn))
    optimizer = make([parameter], lr=0.1, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        (parameter * torch.randn(9, generator=drawn)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    found[name] = parameter.tolist()
"""
WITHOUT = f"""
import json, sys
from foreprop.backends.nocompiler import do_without_compiler

do_without_compiler()
{UPDATED}
print(json.dumps([found, "torch._dynamo.eval_frame" in sys.modules]))
"""
ASKED_FOR_MORE = """
import inspect, sys
import torch
from foreprop.backends.nocompiler import NoCompiler, do_without_compiler

do_without_compiler()
standing_in = sys.modules["torch._dynamo"]
assert isinstance(standing_in, NoCompiler) and torch._dynamo is standing_in
inspect.getmodule(inspect.currentframe())  # looks at all modules
assert torch.compiler.disable(len, reason="none") is torch.compiler.disable()(len) is len
assert sys.modules["torch._dynamo"] is standing_in
import torch._dynamo.eval_frame
assert sys.modules["torch._dynamo"] is torch._dynamo is not standing_in
assert standing_in.config is torch._dynamo.config
do_without_compiler()  # too late
assert torch._dynamo is sys.modules["torch._dynamo"] is not standing_in
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
"""


def said(program: str) -> str:
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_optimizers_load_no_compiler_and_have_the_same_bits() -> None:
    usual: dict[str, Any] = {}
    exec(UPDATED, usual)
    assert "torch._dynamo.eval_frame" in sys.modules
    without, has_compiler = json.loads(said(WITHOUT))
    assert not has_compiler
    assert without == usual["found"]
    assert without.keys() == ELEMENTWISE_OPTIMIZERS.keys()


def test_who_asks_for_more_gets_the_compiler() -> None:
    said(ASKED_FOR_MORE)
