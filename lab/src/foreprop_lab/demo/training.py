"""What every node of the demo does: train with each system, a block of steps at a time."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from foreprop.config import Config
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.quantities import option
from foreprop.session.composition import connect
from foreprop.session.shard import shard
from foreprop_lab.datasets import fashion_mnist
from foreprop_lab.demo.network import SmallVgg, layers_of
from foreprop_lab.lab.systems import join_process_group
from foreprop_lab.setting.labsetting import rate_for_balance


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right: int = sum(
            int((model(part).argmax(1) == truth).sum())
            for part, truth in zip(
                torch.split(images, 1000), torch.split(labels, 1000), strict=True
            )
        )
    model.train()
    return right / len(labels)


DDP = "ddp"
BLOCK_STEPS = 12
SCALE = 8
"""Buffers and windows are divided by this: at their usual sizes few would hold this small model."""

_SLICE_ELEMS = 25_000  # for so slow a link; half of the usual

_CALIBRATION_STEPS = 8
_DEFAULT = Config()
MAX_BATCH_SIZE = 60_000 // _CALIBRATION_STEPS
_MOST_NODES = 64
_LEAST_COMPUTE_S = 0.001
_LEAST_RATE = 1e6
MAX_STEPS = 1_000_000
MIN_STEPS = 32
"""The fewest steps: they suffice for a median, and a block has two steps in its middle to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetting:
    steps: int = option("Steps with each system.", 72, least=MIN_STEPS, most=MAX_STEPS)
    workers: int = option("Nodes, each with a worker and a server.", 4, least=2)
    batch_size: int = option("Images per worker and step.", 64, least=1, most=MAX_BATCH_SIZE)
    compute_s: float = option(
        "What the emulated device of each node computes per step, as 300ms.", 0.3
    )
    rate_bits_per_s: float | None = option(
        "Rate of each node's link, as 300Mbit; by default such that communication takes as long as"
        " computation.",
        None,
    )
    presets: tuple[str, ...] = option("Presets to compare, separated by commas.", ("kvstore", "p3"))
    paced: bool = False
    """Whether the sockets are paced, because there are no links of the wanted rate."""
    folder: str = "runs/demo"
    """The folder in which each preset has a folder of its name for its traces."""

    def __post_init__(self) -> None:
        for name, least in (("compute_s", _LEAST_COMPUTE_S), ("rate_bits_per_s", _LEAST_RATE)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"{name} is {value:g}; it must be finite and at least {least:g}")
        if self.workers > _MOST_NODES:
            raise ConfigError(f"workers is {self.workers}; at most {_MOST_NODES} on one machine")

    @property
    def limit_s(self) -> float | None:
        """The least time per step that any schedule can have, once the rate is known."""
        if self.rate_bits_per_s is None:
            return None
        layers = layers_of(self.compute_s)
        return limit.limit_s(layers, nodes=self.workers, rate_bits_per_s=self.rate_bits_per_s)

    @property
    def systems(self) -> tuple[str, ...]:
        """The systems that are compared; DDP only on real links, as nothing paces its sockets."""
        return self.presets if self.paced else (*self.presets, DDP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The times of consecutive steps of one node, in seconds."""

    step_s: list[float]
    waited_s: float | None
    """The time spent waiting for parameters in all steps; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one node has after its training."""

    test_accuracy: float | None
    """The share of right answers; only rank 0 measures it."""
    weights_sha256: str


class Training:
    """One system on one node: foreprop with a preset, or DistributedDataParallel on gloo.

    All nodes are told to do the same at about the same time. DDP has its default buckets.
    """

    def __init__(self, name: str, setting: DemoSetting, data: TensorDataset) -> None:
        torch.manual_seed(0)
        self._model = SmallVgg(setting.compute_s)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)
        self._forward: nn.Module = self._model
        self._session = None
        if name == DDP:
            self._forward = DistributedDataParallel(self._model)
        else:
            config = Config.resolve(
                name,
                workers_per_node=1,
                servers_per_node=1,
                slice_elems=_SLICE_ELEMS,
                unsent_bytes=_DEFAULT.unsent_bytes // SCALE,
                push_window_bytes=_DEFAULT.push_window_bytes // SCALE,
                link_rate_bits_per_s=setting.rate_bits_per_s if setting.paced else None,
                trace=str(Path(setting.folder) / name),
            )
            self._session = connect(self._model, self._optimizer, config)
        self._batches = _batches(data, setting)

    def block(self, steps: int) -> Block:
        if self._session is None:
            return Block(step_s=self._steps(steps), waited_s=None)
        waited_before = self._session.stats()["waited_s"]
        step_s = self._steps(steps)
        waited_s = self._session.stats()["waited_s"] - waited_before
        self._session.flush()
        return Block(step_s=step_s, waited_s=waited_s)

    def _steps(self, count: int) -> list[float]:
        step_s = []
        self._model.clock.restart()
        for _ in range(count):
            started = time.perf_counter()
            images, labels = next(self._batches)
            self._optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(self._forward(images), labels))
            self._model.end_backward()
            self._optimizer.step()
            step_s.append(time.perf_counter() - started)
        return step_s

    def finish(self, test: TensorDataset | None) -> Trained:
        self._model.take_no_time()
        measured = None if test is None else accuracy(self._model, *test.tensors)
        digest = hashlib.sha256()
        for tensor in self._model.state_dict().values():
            digest.update(tensor.contiguous().numpy().tobytes())
        if self._session is not None:
            self._session.close()
        return Trained(test_accuracy=measured, weights_sha256=digest.hexdigest())


def _batches(data: TensorDataset, setting: DemoSetting) -> Iterator[Any]:
    """This rank's batches, without end; they are the same for every system."""
    loader = shard(DataLoader(data, batch_size=setting.batch_size, shuffle=True))
    while True:
        yield from loader


def serve_node(node: int, connection: Connection, setting: DemoSetting) -> None:
    """Do what the coordinator asks for and answer each time, until the connection is closed."""
    torch.set_num_threads(1)
    train, test = fashion_mnist("train"), fashion_mnist("test")
    trainings: dict[str, Training] = {}
    while True:
        kind, name, *details = connection.recv()
        answer: Any = None
        if kind == "calibrate":
            answer = _calibrate(setting, train)
        elif kind == "build":
            if not setting.paced:
                join_process_group()
            trainings[name] = Training(name, setting, train)
        elif kind == "block":
            answer = trainings[name].block(*details)
        elif kind == "finish":
            answer = trainings.pop(name).finish(test if node == 0 else None)
        connection.send(answer)


def _calibrate(setting: DemoSetting, data: TensorDataset) -> float:
    """The CPU seconds of a step of all nodes on this machine: the emulated time must be longer.

    CPU time is measured, so that what else runs on the machine does not count.
    """
    torch.manual_seed(0)
    model = SmallVgg()
    batches = iter(DataLoader(data, batch_size=setting.batch_size))
    times = []
    for _ in range(_CALIBRATION_STEPS):
        images, labels = next(batches)
        started = time.process_time()
        model.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
        times.append(time.process_time() - started)
    return statistics.median(times) * max(1.0, setting.workers / len(os.sched_getaffinity(0)))


def balanced_rate(workers: int, compute_s: float) -> float:
    """The link rate (bit/s) at which the wire takes as long as the compute: balance 1."""
    return rate_for_balance(layers_of(compute_s), nodes=workers, balance=1.0)


def typical_step(step_s: Sequence[float]) -> int:
    """The first of two consecutive steps that took about what a step usually takes.

    ``step_s`` are the times of all measured steps. Both steps are inside a block, where the
    pipeline is neither filled nor emptied.
    """
    median = statistics.median(step_s)
    inside = [i for i in range(len(step_s) - 2) if 0 < i % BLOCK_STEPS < BLOCK_STEPS - 2]
    best = min(inside, key=lambda i: abs(step_s[i] - median) + abs(step_s[i + 1] - median))
    return BLOCK_STEPS + 1 + best  # steps count from 1, and the first block is not measured
