"""One worker of an elastic session; it trains until it is killed.

``TASK`` is JSON (`Task`), and RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set. Every step is a
line of ``steps``: the number, and the machine's monotonic clock at its end, in seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import torch

import foreprop
from foreprop.features.members.counting import SILENT_SHARE
from foreprop.plan.profile import load_profile
from foreprop_lab.lab.accelerator import EmulatedModel
from foreprop_lab.setting.labsetting import LabSetting


class Task(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    scale: int
    nodes: int
    compute_s: float
    silent_s: float
    """A worker that answers nothing for so long is taken for dead."""
    steps: str


def model_of(task: Task) -> EmulatedModel:
    setting = LabSetting(
        profile=load_profile(task.model),
        nodes=task.nodes,
        scale=task.scale,
        compute_s=task.compute_s,
        systems=("p3",),
    )
    return EmulatedModel(setting.layers)


def main() -> None:
    task = msgspec.json.decode(os.environ["TASK"], type=Task)
    model = model_of(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    silent_s = max(1.0, task.silent_s)
    foreprop.parallelize(
        model,
        optimizer,
        elastic=True,
        step_timeout_s=silent_s / SILENT_SHARE,
        silence_timeout_s=silent_s,
        silence_report_s=min(5.0, silent_s),
    )
    train(model, optimizer, Path(task.steps))


def train(model: EmulatedModel, optimizer: torch.optim.Optimizer, steps: Path) -> None:
    x = torch.ones(1, requires_grad=True)
    number = 0
    with steps.open("a", buffering=1) as lines:
        while True:
            number += 1
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            lines.write(f"{number} {time.monotonic():.4f}\n")


if __name__ == "__main__":
    main()
