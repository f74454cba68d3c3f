"""What a step of many small tensors costs the training thread.

    python -m foreprop_lab.benchmarks.manytensors

Two ranks on this machine, without the lab: a hundred layers of 64 x 64, so two hundred tensors,
for which the bytes are nothing and every call counts. With SGD, Adam, clipping in the loop, a
GradScaler and bfloat16, for DDP, for ``p3`` and for servers that update, in turns within one run.
Medians over rounds of the training thread's CPU time per step, and of wall time, which the
machine's load moves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import foreprop
from foreprop_lab.benchmarks.workers import run_workers

LAYERS, WIDTH, BATCH = 100, 64, 8
WARM_UP_STEPS = 10
SYSTEMS = ("ddp", "p3", "p3-servers")
KINDS = ("sgd", "adam", "clipped", "scaled", "bf16")


def _optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=1e-4)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _step(kind: str, run: nn.Module, optimizer: Any, scaler: Any) -> Callable[[], None]:
    x = torch.randn(BATCH, WIDTH)
    casts = kind == "bf16"

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if casts else nullcontext()

    def step() -> None:
        optimizer.zero_grad()
        with context():
            loss = run(x).float().sum()
        if kind == "scaled":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return
        loss.backward()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(run.parameters(), 1.0)
        optimizer.step()

    return step


def _measure(system: str, kind: str, steps: int) -> tuple[float, float]:
    """Milliseconds of a step: of the training thread's CPU, and of the clock."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = _optimizer(kind, model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    run: nn.Module = model
    session: Any = nullcontext()
    if system == "ddp":
        run = DistributedDataParallel(model)
    elif kind == "scaled" and system == "p3-servers":
        session = foreprop.parallelize(model, optimizer, update="servers", scaler=scaler)
    else:
        update: Any = "servers" if system == "p3-servers" else "auto"
        session = foreprop.parallelize(model, optimizer, update=update)
    with session:
        step = _step(kind, run, optimizer, scaler)
        for _ in range(WARM_UP_STEPS):
            step()
        cpu_s, clock_s = time.thread_time(), time.perf_counter()
        for _ in range(steps):
            step()
        found = time.thread_time() - cpu_s, time.perf_counter() - clock_s
    dist.barrier()
    return found[0] / steps * 1e3, found[1] / steps * 1e3


def _work(kinds: Sequence[str], rounds: int, steps: int) -> dict[tuple[str, str], Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for kind in kinds:
            for system in SYSTEMS:
                if (kind, system) != ("clipped", "p3-servers"):  # which refuses such a loop
                    found.setdefault((kind, system), []).append(_measure(system, kind, steps))
    dist.destroy_process_group()
    return {
        about: tuple(statistics.median(column) for column in zip(*times, strict=True))
        for about, times in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds {', '.join(sorted(unknown))}: there are {', '.join(KINDS)}")
    found = run_workers(2, _work, kinds, options.rounds, options.steps)[0]
    shown = Table(title="Milliseconds of a step: training thread's CPU, and by the clock")
    for heading in ("", *SYSTEMS, "p3 over ddp"):
        shown.add_column(heading, justify="right")
    for kind in kinds:
        cells = [found.get((kind, system)) for system in SYSTEMS]
        texts = ["refused" if cell is None else f"{cell[0]:.1f}, {cell[1]:.1f}" for cell in cells]
        ratio = found[kind, "p3"][0] / found[kind, "ddp"][0]
        shown.add_row(kind, *texts, f"{ratio:.2f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
