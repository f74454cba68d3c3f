"""One worker of a system that outlives faults; it trains until it is killed.

``TASK`` is JSON (`Task`), and RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set. Every step is a
line of ``steps``: the number, and the machine's monotonic clock at its end, in seconds.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import foreprop
from foreprop.lab.accelerator import EmulatedModel
from foreprop.workload.profile import load_profile
from foreprop.workload.setting import LabSetting

ELASTIC, TORCHFT = "p3-elastic", "torchft"
LIGHTHOUSE_PORT = 29510
SILENT_SHARE = 0.75
"""Of ``step_timeout_s``: after that an elastic session drops who is silent (docs/elastic.md)."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    system: str
    model: str
    scale: int
    nodes: int
    compute_s: float
    silent_s: float
    """After which a worker that answers nothing is taken for dead."""
    steps: str
    address: str


class Trained(NamedTuple):
    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizer: Any
    store: TCPStore | None = None
    """Which lasts as long as it is held."""


def main() -> None:
    task = msgspec.json.decode(os.environ["TASK"], type=Task)
    setting = LabSetting(
        profile=load_profile(task.model),
        nodes=task.nodes,
        scale=task.scale,
        compute_s=task.compute_s,
        systems=("p3",),
    )
    model = EmulatedModel(setting.layers)
    model.clock.waits_for_host = True  # both systems block the host now and then
    begin = _elastic if task.system == ELASTIC else _torchft
    train(model, begin(model, task), Path(task.steps))


def train(model: EmulatedModel, trained: Trained, steps: Path) -> None:
    x = torch.ones(1, requires_grad=True)
    number = 0
    with steps.open("a", buffering=1) as lines:
        while True:
            number += 1
            trained.optimizer.zero_grad()
            trained.forward(x).sum().backward()  # type: ignore[no-untyped-call]
            trained.optimizer.step()
            lines.write(f"{number} {time.monotonic():.4f}\n")


def _sgd(model: EmulatedModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _elastic(model: EmulatedModel, task: Task) -> Trained:
    optimizer = _sgd(model)
    limit_s = task.silent_s / SILENT_SHARE
    foreprop.parallelize(model, optimizer, elastic=True, step_timeout_s=limit_s)
    return Trained(model, optimizer)


def _torchft(model: EmulatedModel, task: Task) -> Trained:
    """Each worker is a replica group of its own, as torchft's own example of DDP."""
    torchft: Any = importlib.import_module(TORCHFT)

    limit, optimizer = timedelta(seconds=task.silent_s), _sgd(model)
    store = TCPStore(task.address, 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr=task.address,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        replica_id=f"rank{os.environ['RANK']}_",
        hostname=task.address,
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    return Trained(wrapped, torchft.Optimizer(manager, optimizer), store)


if __name__ == "__main__":
    main()
