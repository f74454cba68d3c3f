"""Asynchronous workers: the values that they read are old, on a clock of simulated steps.

See `experiments.staleloop`. A step's values are read, and its gradients applied, all at once: the
order on the wire does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from foreprop.core.staleness import Staleness, compensate
from foreprop_lab.experiments.accuracy.tasks import Task
from foreprop_lab.experiments.accuracy.training import (
    Outcome,
    Point,
    gradient_of,
    order_of,
    scored_steps,
)
from foreprop_lab.experiments.staleloop import StaleLoop


def train_stale(
    task: Task,
    seed: int,
    *,
    staleness: Staleness,
    strength: float,
    step_s: Sequence[Sequence[float]],
    scores: int = 1,
) -> Outcome:
    """Compute as many gradients as synchronous workers would; faster workers compute more of them.

    ``step_s`` has how long each worker's steps take where it waits for nobody; they are repeated.
    An update is one worker's share of the mean. ``strength`` is `compensate`'s.
    """
    training = _Training(task, seed, strength, len(step_s), scores)
    loop = StaleLoop(
        training,
        elems=training.elems,
        workers=len(step_s),
        staleness=staleness,
        step_s=lambda rank, step: step_s[rank][(step - 1) % len(step_s[rank])],
    )
    loop.run(lambda _: training.has_more)
    return Outcome(training.course)


class _Training:
    """A training for `foreprop_lab.experiments.staleloop.StaleLoop`."""

    def __init__(self, task: Task, seed: int, strength: float, ranks: int, scores: int) -> None:
        self.course: list[Point] = []
        self._task, self._strength, self._ranks = task, strength, ranks
        self._data, self._test = task.load()
        torch.manual_seed(seed)
        self._model = task.build()
        self._order = order_of(task, len(self._data[1]), seed, ranks)
        self._values = nn.Parameter(parameters_to_vector(self._model.parameters()).detach())
        self._optimizer = torch.optim.SGD([self._values], lr=task.lr, momentum=task.momentum)
        self._read = [self._values.detach().clone() for _ in range(ranks)]
        self._pushed: dict[int, torch.Tensor] = {}
        self._pushes = 0
        self._most = len(self._order) * ranks
        self._scored = scored_steps(len(self._order), scores)

    @property
    def elems(self) -> int:
        return len(self._values)

    @property
    def has_more(self) -> bool:
        """Whether some gradients are not applied yet."""
        return self._pushes < self._most

    def compute(self, rank: int, step: int) -> None:
        vector_to_parameters(self._read[rank], self._model.parameters())
        chosen = self._order[(step - 1) % len(self._order), rank]
        examples = (self._data[0][chosen], self._data[1][chosen])
        self._pushed[rank] = gradient_of(self._task, self._model, examples)

    def update(self, ranks: Sequence[int], now_s: float) -> None:
        now = self._values.detach()
        total = torch.zeros_like(now)
        for rank in ranks:
            total += compensate(
                self._pushed.pop(rank), now, self._read[rank], strength=self._strength
            )
        self._values.grad = total / self._ranks
        for group in self._optimizer.param_groups:
            group["lr"] = self._task.lr * (1 - self._pushes / self._most)
        self._optimizer.step()
        for step in self._whole_steps(len(ranks)):
            self._score(now_s, step)

    def read(self, rank: int, step: int) -> None:
        del step
        self._read[rank] = self._values.detach().clone()

    def _whole_steps(self, pushes: int) -> Iterator[int]:
        """The steps that synchronous workers would have ended with these pushes."""
        before = self._pushes
        self._pushes += pushes
        yield from range(before // self._ranks + 1, self._pushes // self._ranks + 1)

    def _score(self, now_s: float, step: int) -> None:
        if step not in self._scored:
            return
        vector_to_parameters(self._values.detach(), self._model.parameters())
        epoch = step * self._task.epochs / len(self._order)
        self.course.append(Point(epoch, now_s, self._task.score(self._model, self._test)))
