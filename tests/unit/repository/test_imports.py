"""Features load when they are used: what a plain training process imports is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import foreprop

MOST_MODULES, MOST_LINES = 59, 13_880
"""What a process of a plain training may load: bounds that only fall."""
# the aim: 45 modules, 9,000 lines

NEVER = "features plan integrations tools conformance".split()
"""Rooms of which a plain training uses nothing in its first steps."""
UNUSED = {
    "backends": "composed dedicated elastic hybrid main ring servedstate",
    "config": "checks combinations launchers otherwords plugins sources typed",
    "core": "collect norm rows_machine server_machine takeover",
    "engine": "gpumemory metrics pacing secret server slices slicestore status sums trace",
    "params": "addedsteps compute_trace copies gradientmath loss_scale moving_average scripted"
    " servedparameter wrappers",
    "session": "alone automatic checkpoints features figures loop meeting position rebalancing"
    " reconnecting redealing saving settingswatch shard shares stored slicesize writing",
}
"""Modules of the other rooms that it does without."""

TRAINING = """
import json, os, sys
import torch
import foreprop
from tests.cluster import run_cluster

os.environ["PYTHONPROFILEIMPORTTIME"] = "1"  # of the server: it tells what it imports

def train(world):
    world.in_process = False  # its server is a process: the native plane's would be in this one
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foreprop.parallelize(model, optimizer, world=world, plane="python", stall_report_s=600):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

run_cluster(2, train, local_size=2)
own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "foreprop"]
print(json.dumps({module.__name__: module.__file__ for module in own}))
"""
"""Two ranks as torchrun starts them on one machine, but as threads of one process."""


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
    assert not {name for name in loaded() if name.partition(".")[0] in NEVER}
    unused = {f"{room}.{name}" for room, names in UNUSED.items() for name in names.split()}
    assert not unused & loaded().keys()


def test_what_a_plain_training_does_without_is_there() -> None:
    """A name that is there no more would be a promise about nothing."""
    package = Path(foreprop.__file__).parent
    assert all((package / room).is_dir() or (package / f"{room}.py").is_file() for room in NEVER)
    for room, names in UNUSED.items():
        missing = [name for name in names.split() if not (package / room / f"{name}.py").is_file()]
        assert missing == [], room


@pytest.mark.long
def test_its_server_loads_no_compiler() -> None:
    imported = {line.rpartition("|")[2].strip() for line in training().stderr.splitlines()}
    assert {"torch.optim.sgd", "foreprop.engine.slicestore"} <= imported, training().stderr
    assert not {name for name in imported if name.startswith(("torch._dynamo.", "sympy"))}


@pytest.mark.long
def test_no_feature_of_a_server_loads_the_compiler() -> None:
    program = """
import sys
from foreprop.backends.nocompiler import do_without_compiler

do_without_compiler()
import foreprop.features.compression.replycodecs, foreprop.features.members.counting
import foreprop.params.normgate
import foreprop.engine.calls, foreprop.features.nodes.relay, foreprop.features.members.counting
import foreprop.features.uneven.arrivals, foreprop.features.tables.service
sys.exit("torch._dynamo.eval_frame" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_the_package_by_itself_loads_no_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, foreprop; sys.exit('torch' in sys.modules)"], check=True
    )
