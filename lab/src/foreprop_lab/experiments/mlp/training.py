"""The comparison paper's experiment on one worker: a multilayer perceptron on Fashion-MNIST.

Alqahtani and Demirbas, section IV: two hidden layers and a softmax, batches of 100, one to seven
workers; 1, 2 and 4 parameter servers, peers, and a ring. Images, gradients and updates are real. A
layer is computed within the time that it is given, as on the lab's emulated accelerators, so seven
workers on two cores take as long as one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from foreprop.backends.processes import die_with_parent
from foreprop.config import PRESETS, Config
from foreprop.errors import ConfigError
from foreprop.plan.deployment import Deployment
from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop.quantities import option
from foreprop.session.composition import connect
from foreprop_lab.datasets import MEAN, STD, load_arrays
from foreprop_lab.lab.accelerator import DeviceClock
from foreprop_lab.lab.systems import Steps, join_process_group
from foreprop_lab.setting.links import Network

SERVERS = {"1ps": 1, "2ps": 2, "4ps": 4}
"""The systems with servers on machines of their own, and how many they have."""
P2P, RING, DDP = "p2p", "ring", "ddp"
MLP_SYSTEMS = (*SERVERS, P2P, RING, DDP)
IMAGES = 60_000
PIXELS, CLASSES = 28 * 28, 10
_MOST_NODES = 64
_BURST_BYTES = 8_000
"""The token bucket of an idle link: the lab's usual one would hold 5 % of this small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSetting:
    """One number of workers and several systems. Raises `ConfigError` for what cannot be."""

    workers: int
    systems: tuple[str, ...] = MLP_SYSTEMS
    preset: str = option(f"Of servers and peers: {', '.join(PRESETS)}.", "tensorflow")
    """The default is the protocol of the paper's TensorFlow."""
    rate_bits_per_s: float = option("The links' rate, as 100Mbit.", 100e6)
    """The rate in each direction."""
    compute_s: float = option("What a worker computes for one batch, as 300ms.", 0.3)
    """The paper's T_processing."""
    batch: int = option("Images in each worker's batch.", 100)
    hidden: int = option("Units of each of the two hidden layers.", 256)
    steps: int = 40
    """The measured steps of each system."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.systems if name not in MLP_SYSTEMS]
        if unknown or not self.systems or len(set(self.systems)) < len(self.systems):
            known = ", ".join(MLP_SYSTEMS)
            raise ConfigError(f"systems is {', '.join(self.systems)!r}; there are {known}")
        if self.preset not in PRESETS:
            raise ConfigError(f"preset is {self.preset!r}; there are {', '.join(PRESETS)}")
        for name in ("workers", "batch", "hidden", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1")
        if self.nodes > _MOST_NODES:
            raise ConfigError(f"workers is {self.workers}; at most {_MOST_NODES} with all servers")
        if self.batch > IMAGES // self.workers:
            share = IMAGES // self.workers
            raise ConfigError(f"batch is {self.batch}; a worker's share has {share} images")
        for name in ("rate_bits_per_s", "compute_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive, finite")

    @property
    def servers(self) -> int:
        """The number of machines for servers, which the systems share."""
        return max((SERVERS.get(name, 0) for name in self.systems), default=0)

    @property
    def nodes(self) -> int:
        return self.workers + self.servers

    @property
    def network(self) -> Network:
        return Network(
            nodes=self.nodes, rate_bits_per_s=self.rate_bits_per_s, burst_bytes=_BURST_BYTES
        )

    @property
    def layers(self) -> list[Layer]:
        """The layers; times go by FLOPs, a third forward and two thirds backward, as in the lab."""
        return mlp_profile(self.hidden).layers(scale=1, compute_s=self.compute_s)

    @property
    def epoch_steps(self) -> float:
        return IMAGES / (self.batch * self.workers)

    def deployment(self, system: str) -> Deployment:
        """The setting of a system as the refined model takes it."""
        servers = SERVERS.get(system, 0)
        return Deployment(
            layers=self.layers,
            architecture="ps" if servers else system,  # type: ignore[arg-type]
            preset=self.preset,
            nodes=self.workers,
            dedicated_servers=servers,
            rate_bits_per_s=self.rate_bits_per_s,
        )


def mlp_profile(hidden: int) -> Profile:
    """The profile of a perceptron with 784 inputs, two hidden layers and 10 classes."""
    widths = (PIXELS, hidden, hidden, CLASSES)
    arrays = []
    for number, (before, after) in enumerate(itertools.pairwise(widths), start=1):
        flops = float(before * after)
        arrays += [
            ProfiledArray(name=f"fc{number}.weight", shape=(after, before), forward_flops=flops),
            ProfiledArray(name=f"fc{number}.bias", shape=(after,), forward_flops=0.0),
        ]
    return Profile(name="mlp", arrays=tuple(arrays))


class _TimedLinear(torch.autograd.Function):
    """A fully connected layer, computed within the time that it occupies the device's clock."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, layer: TimedLayer
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        out = torch.addmm(bias, x, weight.t())
        layer.clock.occupy(layer.forward_s)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer: TimedLayer = ctx.layer
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        gradients = to_x, gradient.t() @ x, gradient.sum(0), None
        layer.clock.occupy(layer.backward_s)
        layer.clock.backward_ended_at = time.monotonic()
        return gradients


class TimedLayer(nn.Linear):
    """A layer of real numbers in emulated time, from (batch, width) to (batch, width)."""

    def __init__(self, inputs: int, outputs: int, times: Layer, clock: DeviceClock) -> None:
        super().__init__(inputs, outputs)
        self.clock = clock
        self.forward_s = times.forward_s
        self.backward_s = times.backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked_at = time.monotonic()
        weight, bias = self.weight.view_as(self.weight), self.bias.view_as(self.bias)
        self.clock.waited(asked_at)  # here what is missing has been waited for
        out: torch.Tensor = _TimedLinear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return out


class Mlp(nn.Module):
    """The perceptron, from images (batch, 784) to logits (batch, 10)."""

    def __init__(self, setting: MlpSetting) -> None:
        super().__init__()
        self.clock = DeviceClock()
        first, second, third = setting.layers
        self.fc1 = TimedLayer(PIXELS, setting.hidden, first, self.clock)
        self.fc2 = TimedLayer(setting.hidden, setting.hidden, second, self.clock)
        self.fc3 = TimedLayer(setting.hidden, CLASSES, third, self.clock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))
        return out


class Images:
    """One worker's share of Fashion-MNIST, in batches, shuffled anew in every pass."""

    def __init__(self, setting: MlpSetting, rank: int) -> None:
        images, labels = load_arrays("train")
        self._images = torch.from_numpy(images[rank :: setting.workers].reshape(-1, PIXELS))
        self._labels = torch.from_numpy(labels[rank :: setting.workers])
        self._batch = setting.batch
        self._generator = torch.Generator().manual_seed(rank)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches without end: images float32 (batch, 784), labels int64 (batch,)."""
        while True:
            order = torch.randperm(len(self._labels), generator=self._generator)
            for chosen in torch.split(order, self._batch):
                if len(chosen) == self._batch:
                    pixels = self._images[chosen].to(torch.float32)
                    yield (pixels / 255 - MEAN) / STD, self._labels[chosen].to(torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSteps:
    """One worker's measurements of a block of steps."""

    steps: Steps = field(default_factory=Steps)
    losses: list[float] = field(default_factory=list)


class MlpSystem:
    """One way of training the perceptron, on one worker."""

    def __init__(self, name: str, setting: MlpSetting, rank: int) -> None:
        torch.manual_seed(0)
        self._model = Mlp(setting)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        self._batches = Images(setting, rank).batches()
        self._forward: Callable[[torch.Tensor], torch.Tensor] = self._model
        self._pause: Callable[[], object] = lambda: None
        self._close: Callable[[], object] = lambda: None
        if name == DDP:
            self._forward = DistributedDataParallel(self._model)
            return
        session = connect(self._model, self._optimizer, _config(name, setting))
        self._pause, self._close = session.flush, session.close

    def steps(self, count: int) -> MlpSteps:
        """Make steps; one counts from the end of a forward pass to the end of the next one."""
        clock = self._model.clock
        self._pause()
        clock.restart()
        loss = self._loss()
        seen = MlpSteps()
        for _ in range(count):
            started, idle_before = clock.free_at, clock.idle_s
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            clock.waited(clock.backward_ended_at)  # with DDP it ends with a wait for gradients
            self._optimizer.step()
            loss = self._loss()
            seen.steps.step_s.append(clock.free_at - started)
            seen.steps.waited_s.append(clock.idle_s - idle_before)
            seen.losses.append(float(loss.detach()))
        return seen

    def _loss(self) -> torch.Tensor:
        images, labels = next(self._batches)
        return cross_entropy(self._forward(images), labels)

    def close(self) -> None:
        self._close()


def _config(name: str, setting: MlpSetting) -> Config:
    if name == RING:
        return Config(architecture="ring")
    servers = SERVERS.get(name, 0)
    return Config.resolve(
        setting.preset,
        architecture="ps" if servers else "p2p",
        dedicated_servers=servers,
        workers_per_node=1,
    )


def serve_mlp_node(node: int, connection: Connection, setting: MlpSetting) -> None:
    """Do what the coordinator asks for, until it closes; the first nodes train, others serve."""
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = str(setting.workers)
    systems: dict[str, MlpSystem] = {}
    with contextlib.ExitStack() as ending:
        if node < setting.workers:
            join_process_group()
        else:
            ending.callback(_start_server().kill)
        while True:
            kind, name, *details = connection.recv()
            answer: MlpSteps | None = None
            if node < setting.workers:
                if kind == "build":
                    systems[name] = MlpSystem(name, setting, node)
                elif kind == "steps":
                    answer = systems[name].steps(*details)
                elif kind == "drop":
                    systems.pop(name).close()
            connection.send(answer)


def _start_server() -> subprocess.Popen[bytes]:
    """Start a server process, which stays idle in sessions with fewer servers."""
    return subprocess.Popen(
        [sys.executable, "-m", "foreprop.tools.cli.main", "server"],
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        preexec_fn=die_with_parent,  # it would wait for other sessions
    )
