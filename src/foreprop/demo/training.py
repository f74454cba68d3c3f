"""What every worker of the demo does: the same training once per preset, in alternating blocks."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.utils.data import DataLoader, TensorDataset

from foreprop.config import Config
from foreprop.datasets import fashion_mnist
from foreprop.demo.model import SmallVgg, accuracy
from foreprop.engine.world import World, current_world
from foreprop.training.parallelize import parallelize
from foreprop.training.shard import shard

_CALIBRATION_STEPS = 8
_BLOCK_STEPS = 12
MAX_BATCH_SIZE = 60_000 // _CALIBRATION_STEPS
MIN_STEPS = 32
"""Enough for a median, and for two steps in the middle of a block to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetting:
    workers: int = 4
    steps: int = 120
    batch_size: int = 256
    presets: tuple[str, ...] = ("kvstore", "p3")
    rate_bits_per_s: float | None = None
    """Of each node's link; None: so that communication takes as long as computation."""
    folder: str = "runs/demo"
    """Each preset's traces go into a folder of its name in this one."""


@dataclass(slots=True, kw_only=True)
class PresetOutcome:
    """What one worker measured; times in seconds."""

    step_s: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    test_accuracy: float = 0.0
    weights_sha256: str = ""


class _Training:
    """One preset's model, session and data in one worker."""

    def __init__(self, preset: str, setting: DemoSetting, data: TensorDataset, rate: float) -> None:
        torch.manual_seed(0)
        self.model = SmallVgg()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        config = Config.resolve(
            preset,
            workers_per_node=1,
            servers_per_node=1,
            link_rate_bits_per_s=rate,
            trace=str(Path(setting.folder) / preset),
        )
        self.session = parallelize(self.model, self.optimizer, config=config)
        self.loader = shard(DataLoader(data, batch_size=setting.batch_size, shuffle=True))
        self._batches = self._endless()
        self.outcome = PresetOutcome()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def block(self, steps: int, *, measured: bool) -> None:
        waited_before = self.session.engine.counters.waited_s
        for _ in range(steps):
            started = time.perf_counter()
            images, labels = next(self._batches)
            self.optimizer.zero_grad()
            _backward(torch.nn.functional.cross_entropy(self.model(images), labels))
            self.optimizer.step()
            if measured:
                self.outcome.step_s.append(time.perf_counter() - started)
        if measured:
            self.outcome.waited_s += self.session.engine.counters.waited_s - waited_before
        self.session.flush()

    def finish(self, test: TensorDataset) -> PresetOutcome:
        if self.session.rank == 0:
            self.outcome.test_accuracy = accuracy(self.model, *test.tensors)
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.contiguous().numpy().tobytes())
        self.outcome.weights_sha256 = digest.hexdigest()
        self.session.close()
        return self.outcome


def typical_step(step_s: Sequence[float]) -> int:
    """The first of two consecutive steps that took about what a step usually takes.

    ``step_s`` are the times that a `PresetOutcome` has. Both steps are inside of a block, where the
    pipeline is neither filled nor emptied.
    """
    median = statistics.median(step_s)
    inside = [i for i in range(len(step_s) - 2) if 0 < i % _BLOCK_STEPS < _BLOCK_STEPS - 2]
    best = min(inside, key=lambda i: abs(step_s[i] - median) + abs(step_s[i + 1] - median))
    return _BLOCK_STEPS + 1 + best  # steps count from 1, and the first block is not measured


def train_all(setting: DemoSetting) -> dict[str, Any]:
    """Run by every worker; returns compute time, link rate and each preset's outcome."""
    torch.set_num_threads(1)
    world = current_world()
    train, test = fashion_mnist("train"), fashion_mnist("test")
    compute_s = _calibrate(world, setting, train)
    rate = setting.rate_bits_per_s or _balanced_rate(setting, compute_s)
    with contextlib.ExitStack() as sessions:  # after an error, end them with that error
        runs = {}
        for name in setting.presets:
            runs[name] = _Training(name, setting, train, rate)
            sessions.enter_context(runs[name].session)
        _train_in_turns(runs, setting, visible=world.rank == 0)
        outcomes = {name: run.finish(test) for name, run in runs.items()}
    return {"compute_s": compute_s, "rate_bits_per_s": rate, "outcomes": outcomes}


def _train_in_turns(runs: dict[str, _Training], setting: DemoSetting, *, visible: bool) -> None:
    """Blocks of the presets alternate, so that a change of the machine's load meets all alike."""
    with _progress(enabled=visible) as progress:
        bars = {name: progress.add_task(name, total=setting.steps, note="") for name in runs}
        for done in range(0, setting.steps, _BLOCK_STEPS):
            steps = min(_BLOCK_STEPS, setting.steps - done)
            for name, run in runs.items():
                run.block(steps, measured=done > 0)
                _advance(progress, bars[name], run, steps)


def _calibrate(world: World, setting: DemoSetting, data: TensorDataset) -> float:
    """Seconds per step without communication while all workers compute; rank 0's word counts."""
    torch.manual_seed(0)
    model = SmallVgg()
    batches = iter(DataLoader(data, batch_size=setting.batch_size))
    times = []
    _meet(world, setting.workers)
    for _ in range(_CALIBRATION_STEPS):
        images, labels = next(batches)
        started = time.perf_counter()
        model.zero_grad()
        _backward(torch.nn.functional.cross_entropy(model(images), labels))
        times.append(time.perf_counter() - started)
    compute_s = sorted(times)[len(times) // 2]
    if world.rank == 0:
        world.publish("demo/compute_s", repr(compute_s))
    what = "rank 0's calibration"
    return float(world.lookup("demo/compute_s", timeout_s=60, what=what))


def _backward(loss: Any) -> None:
    loss.backward()


def _meet(world: World, workers: int) -> None:
    """Nobody begins to measure before all have loaded their data."""
    if world.store.add("demo/arrived", 1) == workers:
        world.publish("demo/all", "1")
    world.lookup("demo/all", timeout_s=120, what="the other workers")


def _balanced_rate(setting: DemoSetting, compute_s: float) -> float:
    """The link rate (bit/s) at which the wire takes as long as the compute, see design.md."""
    model_bytes = sum(p.numel() * p.element_size() for p in SmallVgg().parameters())
    share = 2 * (setting.workers - 1) / setting.workers
    return share * model_bytes * 8 / compute_s


def _progress(*, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TextColumn("{task.completed:>4}/{task.total} steps"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    )


def _advance(progress: Progress, bar: TaskID, run: _Training, steps: int) -> None:
    recent = run.outcome.step_s[-steps:]
    note = f"{1e3 * sum(recent) / len(recent):.0f} ms/step" if recent else "warming up"
    progress.update(bar, advance=steps, note=note)
