"""A training script for the tests: what it does, and what goes wrong in it, comes from outside.

``SCENARIO`` is a JSON object (see `Scenario`), ``RESULTS`` a folder. Every rank leaves there
``rank-N.json``: the SHA-256 of its weights, or the error that it raised and when.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while torch is imported: it would look through all of that again and again

import hashlib
import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import foreprop
from tests.faults.faults import Faults
from tests.process.forked import fork_servers

SIZES = {"small": (8, 16, 4), "large": (512, 2048, 512)}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    steps: int = 6
    size: str = "small"
    settings: dict[str, Any] = field(default_factory=dict)
    faults: tuple[dict[str, Any], ...] = ()
    raise_at: dict[str, int] = field(default_factory=dict)  # step by rank
    leave_at: dict[str, int] = field(default_factory=dict)
    late_s: dict[str, float] = field(default_factory=dict)  # before parallelize()
    die_at: dict[str, int] = field(default_factory=dict)
    linger_s: dict[str, float] = field(default_factory=dict)  # before the weights are read
    loader_workers: int = 0
    keep_loader: bool = False  # its workers are alive when the script ends
    shuffle: bool = True
    pause_s: float = 0.0  # between steps
    only_first_attempt: bool = False
    thread_s: float = 0.0  # how long a thread keeps the process after an error

    def encode(self) -> str:
        return json.dumps(vars(self))


def main() -> None:
    scenario = Scenario(**json.loads(os.environ["SCENARIO"]))
    rank = int(os.environ.get("RANK", "0"))
    result: dict[str, Any] = {"pid": os.getpid()}
    try:
        result["sha256"] = train(scenario, rank)
    except BaseException as error:
        result |= {"error": type(error).__name__, "message": str(error), "at_s": time.monotonic()}
        raise
    finally:
        write_result(rank, result)


def write_result(rank: int, result: dict[str, Any]) -> None:
    (Path(os.environ["RESULTS"]) / f"rank-{rank}.json").write_text(json.dumps(result))


def make_training(size: str) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    if size == "words":  # a table with sparse gradients
        table = nn.Embedding(1000, 16, sparse=True)
        model = nn.Sequential(table, nn.Flatten(), nn.Linear(64, 4))
        inputs = torch.randint(1000, (512, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, optimizer, TensorDataset(inputs, torch.randn(512, 4))
    size_in, hidden, size_out = SIZES[size]
    model = nn.Sequential(nn.Linear(size_in, hidden), nn.ReLU(), nn.Linear(hidden, size_out))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, TensorDataset(torch.randn(512, size_in), torch.randn(512, size_out))


def train(scenario: Scenario, rank: int) -> str:
    torch.manual_seed(0)
    model, optimizer, data = make_training(scenario.size)
    time.sleep(scenario.late_s.get(str(rank), 0.0))
    session = foreprop.parallelize(model, optimizer, **scenario.settings)
    faults = Faults(scenario.faults, rank, model, session)
    loader = foreprop.shard(
        DataLoader(
            data,
            batch_size=4,
            shuffle=scenario.shuffle,
            num_workers=scenario.loader_workers,
            persistent_workers=scenario.keep_loader,
        )
    )
    steps = scenario.leave_at.get(str(rank), scenario.steps)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step, (x, y) in zip(range(1, steps + 1), batches(loader), strict=False):
        if scenario.raise_at.get(str(rank)) == step and (first or not scenario.only_first_attempt):
            threading.Thread(target=time.sleep, args=(scenario.thread_s,)).start()
            raise ValueError("the data are odd")
        if scenario.die_at.get(str(rank)) == step:
            write_result(rank, {"at_s": time.monotonic()})
            os.kill(os.getpid(), signal.SIGKILL)
        faults.step = step
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        faults.between()
        time.sleep(scenario.pause_s)
    if scenario.keep_loader:
        kept.append(loader)
    time.sleep(scenario.linger_s.get(str(rank), 0.0))
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


kept: list[Any] = []


def batches(loader: Any) -> Any:
    while True:
        yield from loader


if __name__ == "__main__":
    assert foreprop.parallelize  # is loaded at its first use
    gc.freeze()
    gc.enable()
    fork_servers(int(os.environ.get("FORK_SERVERS", "0")))
    main()
