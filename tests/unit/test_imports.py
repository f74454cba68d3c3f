"""Features load when they are used: what a plain training process imports is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

MOST_MODULES = 60  # of these a step that workers make takes three
MOST_LINES = 12_550

NEVER = (
    "numerics compression tables relays staleness elastic collectives data auto workload"
    " model simulate integrations report run doctor compare lab demo cli callbacks"
).split()
"""Folders of which a plain training uses nothing."""

TRAINING = """
import json, os, sys
import torch
import foreprop
from tests.cluster import worlds

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
world = worlds(1)[0]
world.in_process = False  # its server is a process, as any server is
os.environ["PYTHONPROFILEIMPORTTIME"] = "1"  # of the server: it tells what it imports
with foreprop.parallelize(model, optimizer, world=world, stall_report_s=600):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "foreprop"]
print(json.dumps({module.__name__: module.__file__ for module in own}))
"""


@cache
def training() -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", TRAINING], capture_output=True, text=True, check=True, timeout=100
    )


def loaded() -> dict[str, Path]:
    """The modules that a plain training loads, and their files."""
    found = json.loads(training().stdout.splitlines()[-1])
    return {name.removeprefix("foreprop."): Path(file) for name, file in found.items()}


@pytest.mark.long
def test_a_plain_training_loads_few_modules() -> None:
    assert len(loaded()) <= MOST_MODULES, sorted(loaded())


@pytest.mark.long
def test_a_plain_training_loads_few_lines() -> None:
    lines = {name: len(file.read_text().splitlines()) for name, file in loaded().items()}
    assert sum(lines.values()) <= MOST_LINES, lines


@pytest.mark.long
def test_a_plain_training_loads_no_feature() -> None:
    features = {name for name in loaded() if name.partition(".")[0] in NEVER}
    assert not features
    servers_side = {"path.server", "path.slices", "core.server_machine", "core.rows_machine"}
    assert not servers_side & loaded().keys()
    unused = {"hooks.scripted", "hooks.compute_trace", "session.checkpoints", "session.automatic"}
    unused |= {"hooks.copies", "hooks.wrappers", "config.typed"}
    unused |= {"path.requests", "path.sums", "path.tensors", "path.gpumemory", "observe.trace"}
    unused |= {"observe.metrics", "observe.status", "session.figures", "session.seconderror"}
    unused |= {"config.checks", "config.otherhosts", "config.parsing"}
    unused |= {"core.norm", "core.agreement", "core.shards", "core.collect"}
    unused |= {"link.pacing", "servers.dedicated", "servers.main", "servers.servedstate"}
    assert not unused & loaded().keys()


@pytest.mark.long
def test_its_server_loads_no_compiler() -> None:
    imported = {line.rpartition("|")[2].strip() for line in training().stderr.splitlines()}
    assert {"torch.optim.sgd", "foreprop.path.slicestore"} <= imported, training().stderr
    assert not {name for name in imported if name.startswith(("torch._dynamo.", "sympy"))}


def test_the_package_by_itself_loads_no_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, foreprop; sys.exit('torch' in sys.modules)"], check=True
    )
