"""What a step of two ranks costs where the network costs nothing, beside PyTorch's own."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foreprop.config import Config
from foreprop.engine import pulsing
from foreprop.session.composition import parallelize
from foreprop.session.session import Session
from foreprop_lab.benchmarks.workers import run_workers

DDP, AGAIN = "ddp", "ddp, again"
ALONE = "alone"
"""Each rank by itself: no gradient is exchanged, which no kind can beat."""
_WARM_UP_STEPS = 5

Batch = tuple[torch.Tensor, torch.Tensor]
Training = tuple[nn.Module, Callable[[nn.Module], torch.optim.Optimizer], Batch, float | None]


class Cpu(NamedTuple):
    """CPU seconds by who has used them."""

    training_s: float
    """Threads that call the training loop."""
    others_s: float
    """All other threads of the ranks, foreprop's and gloo's, and what answers for the ranks."""
    servers_s: float

    @classmethod
    def used(cls) -> Cpu:
        """The CPU time of this rank and its servers so far."""
        this = psutil.Process()
        whole = sum(this.cpu_times()[:2])
        training = sum(t.user_time + t.system_time for t in this.threads() if t.id == this.pid)
        others, servers = whole - training, 0.0
        for child in this.children(recursive=True):
            used = sum(child.cpu_times()[:2])
            if pulsing.__file__ in child.cmdline():  # every session has one, with servers or not
                others += used
            else:
                servers += used
        return cls(training, others, servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackCost:
    """Medians over rounds; times are per step, CPU time is that of all ranks together."""

    model: str
    kind: str
    step_s: float
    ratio: float
    """The step's time over DDP's in the same round."""
    cpu: Cpu


class _ImageNetwork(nn.Sequential):
    """The network of PyTorch's MNIST example: 1.2 million parameters, nearly all in one layer."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


class _Gpt(nn.Module):
    """nanoGPT's configuration for a laptop: 0.8 million parameters in 52 tensors."""

    def __init__(self, *, words: int = 65, width: int = 128, context: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        hidden = self.blocks(self.tokens(words) + self.positions, mask=mask, is_causal=True)
        return cast("torch.Tensor", self.head(hidden)).transpose(1, 2)


class _Norms(nn.Module):
    """100 layers that normalise so many of the features: 200 tensors of 64 to 1,000 elements."""

    def __init__(self, *, layers: int = 100, least: int = 64, most: int = 1000) -> None:
        super().__init__()
        widths = [least + (most - least) * i // (layers - 1) for i in range(layers)]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(features), 1)
        for norm in self.norms:
            width = cast("nn.LayerNorm", norm).normalized_shape[0]
            total = total + norm(features[:, :width] + total)[:, :1]
        return features[:, :16] + total


def _images() -> Training:
    batch = (torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))
    return _ImageNetwork(), lambda m: torch.optim.Adadelta(m.parameters()), batch, None


def _words() -> Training:
    """A transformer whose gradients are clipped, so that workers update."""
    batch = (torch.randint(65, (12, 64)), torch.randint(65, (12, 64)))
    return _Gpt(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), batch, 1.0


def _layers() -> Training:
    """A hundred linear layers, so small that only the work per parameter counts."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100)))
    batch = (torch.randn(64, 16), torch.randint(16, (64,)))
    return model, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9), batch, None


def _norms() -> Training:
    """A model of so many small tensors that only the work per tensor counts."""
    batch = (torch.randn(16, 1000), torch.randint(16, (16,)))
    return _Norms(), lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9), batch, None


def _wide() -> Training:
    """100 MB of parameters: what counts is moving the bytes."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    batch = (torch.randn(64, 2048), torch.randint(2048, (64,)))
    return model, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9), batch, None


MODELS: dict[str, Callable[[], Training]] = {
    "mnist": _images,
    "gpt": _words,
    "layers": _layers,
    "norms": _norms,
    "wide": _wide,
}


Measured = tuple[float, Cpu]
"""Seconds from step to step, and what CPU time this rank has used for one."""


class _Loop:
    """A training loop of a kind: one of foreprop's architectures, `DDP` or `ALONE`."""

    def __init__(self, training: Training, kind: str) -> None:
        self._model, make_optimizer, self._batch, self._max_norm = training
        self._optimizer = make_optimizer(self._model)
        self._session: Session | None = None
        if kind == DDP:
            self._model = DistributedDataParallel(self._model)
        elif kind != ALONE:
            config = Config.resolve(architecture=kind)
            self._session = parallelize(self._model, self._optimizer, config=config)

    def measure(self, steps: int) -> Measured:
        """One step's costs; the first one is not counted."""
        self._step()
        self._settle()
        before, started = Cpu.used(), time.perf_counter()
        for _ in range(steps):
            self._step()
        self._settle()
        took_s = (time.perf_counter() - started) / steps
        used = zip(Cpu.used(), before, strict=True)
        return took_s, Cpu(*((after - then) / steps for after, then in used))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _settle(self) -> None:
        if self._session is not None:
            self._session.flush()
        dist.barrier()

    def _step(self) -> None:
        inputs, targets = self._batch
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._optimizer.step()


def measure_loopback(
    *, models: Sequence[str], kinds: Sequence[str], ranks: int, rounds: int, steps: int
) -> list[LoopbackCost]:
    """Measure rounds in which DDP and every kind make some steps, in random order, for each model.

    ``models`` are names in `MODELS`, ``kinds`` architectures. Each rank has one thread of torch.
    """
    found = run_workers(ranks, _work, models, kinds, rounds, steps)
    return [
        _cost(model, kind, [found[rank][model] for rank in range(ranks)])
        for model in models
        for kind in (DDP, AGAIN, ALONE, *kinds)
    ]


def _cost(model: str, kind: str, of_ranks: Sequence[Mapping[str, list[Measured]]]) -> LoopbackCost:
    first = of_ranks[0]
    step_s = [took_s for took_s, _ in first[kind]]
    plain_s = [took_s for took_s, _ in first[DDP]]
    rounds = zip(*([cpu for _, cpu in own[kind]] for own in of_ranks), strict=True)
    together = [[sum(parts) for parts in zip(*cpus, strict=True)] for cpus in rounds]
    return LoopbackCost(
        model=model,
        kind=kind,
        step_s=statistics.median(step_s),
        ratio=statistics.median(own / ddp for own, ddp in zip(step_s, plain_s, strict=True)),
        cpu=Cpu(*(statistics.median(part) for part in zip(*together, strict=True))),
    )


def _work(
    models: Sequence[str], kinds: Sequence[str], rounds: int, steps: int
) -> dict[str, dict[str, list[Measured]]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return {model: _measure(model, kinds, rounds, steps) for model in models}
    finally:
        dist.destroy_process_group()


def _measure(
    model: str, kinds: Sequence[str], rounds: int, steps: int
) -> dict[str, list[Measured]]:
    torch.manual_seed(0)
    loops = {kind: _Loop(MODELS[model](), kind) for kind in (DDP, ALONE, *kinds)}
    loops[AGAIN] = loops[DDP]
    found: dict[str, list[Measured]] = {kind: [] for kind in loops}
    for loop in loops.values():
        loop.measure(_WARM_UP_STEPS)
    for turn in range(rounds):  # all ranks in the same order
        for kind in random.Random(turn).sample(sorted(loops), len(loops)):
            found[kind].append(loops[kind].measure(steps))
    for loop in loops.values():
        loop.close()
    return found
