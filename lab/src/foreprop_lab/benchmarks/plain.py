"""What a step costs in a world of one, beside the same step without foreprop."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from foreprop.config import Config
from foreprop.session.composition import connect, parallelize
from foreprop.session.session import Session
from foreprop_lab.benchmarks.wire import lonely_world

PLAIN, AGAIN, ALONE, SERVED = "plain", "plain, again", "parallelize", "with a server"
_WARM_UP_STEPS = 5

Training = tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """CPU time of this process, all its threads; medians over rounds."""

    model: str
    kind: str
    step_s: float
    ratio: float
    """The CPU time over the plain step's in the same round."""


def many_layers() -> Training:
    """100 linear layers, so small that what is done by parameter counts."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), torch.randn(8, 16)


def transformer() -> Training:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return model, torch.optim.AdamW(model.parameters()), torch.randn(4, 32, 64)


MODELS: dict[str, Callable[[], Training]] = {
    "MLP of 100 layers": many_layers,
    "transformer": transformer,
}


class _Loop:
    """A training loop. Its ``session`` stays open, or is opened anew for each measurement."""

    def __init__(self, training: Training, session: Callable[[], Session] | Session | None) -> None:
        self._model, self._optimizer, self._batch = training
        self._session = session

    def cpu_s(self, steps: int) -> float:
        if self._session is None:
            return self._measure(steps, lambda: None)
        if isinstance(self._session, Session):
            return self._measure(steps, self._session.flush)
        with self._session() as session:
            return self._measure(steps, session.flush)

    def _measure(self, steps: int, flush: Callable[[], None]) -> float:
        self._step()  # what was done before this is no longer in the caches
        flush()
        started = time.process_time()
        for _ in range(steps):
            self._step()
        flush()
        return (time.process_time() - started) / steps

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()


def measure_alone(*, rounds: int, steps: int) -> list[StepCost]:
    """Measure rounds in which every kind makes some steps, for each model, on one thread."""
    with _one_thread():
        return [cost for name in MODELS for cost in _measure(name, rounds=rounds, steps=steps)]


def _measure(name: str, *, rounds: int, steps: int) -> Iterator[StepCost]:
    ours, served = MODELS[name](), MODELS[name]()
    model, optimizer, _ = served
    with connect(model, optimizer, Config.resolve("p3"), world=lonely_world()) as session:
        loops = {
            PLAIN: _Loop(ours, None),  # the same objects: where they lie in memory is 3 percent
            AGAIN: _Loop(ours, None),
            ALONE: _Loop(ours, lambda: parallelize(ours[0], ours[1])),
            SERVED: _Loop(served, session),
        }
        for loop in loops.values():
            loop.cpu_s(_WARM_UP_STEPS)
        found = [_round(loops, turn, steps) for turn in range(rounds)]
    for kind in loops:
        yield StepCost(
            model=name,
            kind=kind,
            step_s=statistics.median(costs[kind] for costs in found),
            ratio=statistics.median(costs[kind] / costs[PLAIN] for costs in found),
        )


def _round(loops: dict[str, _Loop], turn: int, steps: int) -> dict[str, float]:
    """Measure all kinds, in another order each time: what one leaves in the caches falls on all."""
    kinds = random.Random(turn).sample(sorted(loops), len(loops))
    return {kind: loops[kind].cpu_s(steps) for kind in kinds}


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
