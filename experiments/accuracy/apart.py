"""Workers apart: what they read is old (`core.staleness`), on a clock of simulated steps.

The server's state machine decides who goes on when. A step's values are read, and its gradients
applied, all at once: what is first on the wire is not first in the update.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from experiments.accuracy.tasks import Task
from experiments.accuracy.training import Outcome, Point, gradient_of, order_of, scored_steps
from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import FrameSent, PushArrived, SendFrame
from foreprop.core.slicing import Slice
from foreprop.core.staleness import Staleness, StaleServer, compensate


def train_apart(
    task: Task,
    seed: int,
    *,
    staleness: Staleness,
    strength: float,
    step_s: Sequence[Sequence[float]],
    scores: int = 1,
) -> Outcome:
    """As many gradients as synchronous workers compute; faster workers compute more of them.

    ``step_s``: how long each worker's steps take where it waits for nobody; they are repeated. An
    update is one worker's share of the mean. ``strength`` is `compensate`'s.
    """
    return _Apart(task, seed, staleness, strength, step_s, scores).run()


class _Apart:
    def __init__(
        self,
        task: Task,
        seed: int,
        staleness: Staleness,
        strength: float,
        step_s: Sequence[Sequence[float]],
        scores: int,
    ) -> None:
        self._task, self._strength, self._step_s = task, strength, step_s
        self._ranks = len(step_s)
        self._data, self._test = task.load()
        torch.manual_seed(seed)
        self._model = task.build()
        self._order = order_of(task, len(self._data[1]), seed, self._ranks)
        self._values = nn.Parameter(parameters_to_vector(self._model.parameters()).detach())
        self._optimizer = torch.optim.SGD([self._values], lr=task.lr, momentum=task.momentum)
        self._read = [self._values.detach().clone() for _ in step_s]
        self._server = StaleServer(
            [Slice(0, 0, 0, len(self._values), 0)],
            index=0,
            workers=self._ranks,
            staleness=staleness,
            order="priority",
            names=["model"],
        )
        self._pushed: dict[int, torch.Tensor] = {}
        self._events: list[tuple[float, int, int, int]] = []  # when, number, rank, step
        self._numbers = itertools.count()
        self._pushes = 0
        self._most = len(self._order) * self._ranks
        self._scored = scored_steps(len(self._order), scores)
        self._course: list[Point] = []

    def run(self) -> Outcome:
        for rank in range(self._ranks):
            self._compute(0.0, rank, 1)
        while self._pushes < self._most:
            now_s, _, rank, step = heapq.heappop(self._events)
            vector_to_parameters(self._read[rank], self._model.parameters())
            chosen = self._order[(step - 1) % len(self._order), rank]
            examples = (self._data[0][chosen], self._data[1][chosen])
            self._pushed[rank] = gradient_of(self._task, self._model, examples)
            self._handle(now_s, PushArrived(rank, 0, step, 0, 0))
        return Outcome(self._course)

    def _compute(self, now_s: float, rank: int, step: int) -> None:
        times_s = self._step_s[rank]
        done_s = now_s + times_s[(step - 1) % len(times_s)]
        heapq.heappush(self._events, (done_s, next(self._numbers), rank, step))

    def _handle(self, now_s: float, event: Any) -> None:
        for instruction in self._server.handle(event):
            if isinstance(instruction, UpdateSlice):
                self._update(instruction.ranks)
                for step in self._whole_steps(len(instruction.ranks)):
                    self._score(now_s, step)
                self._handle(now_s, SliceUpdated())
            elif isinstance(instruction, SendFrame):
                rank = instruction.peer
                self._read[rank] = self._values.detach().clone()
                self._compute(now_s, rank, instruction.step + 1)
                self._handle(now_s, FrameSent(rank))

    def _update(self, ranks: Sequence[int]) -> None:
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

    def _whole_steps(self, pushes: int) -> Iterator[int]:
        """Those that synchronous workers would have ended with these pushes."""
        before = self._pushes
        self._pushes += pushes
        yield from range(before // self._ranks + 1, self._pushes // self._ranks + 1)

    def _score(self, now_s: float, step: int) -> None:
        if step not in self._scored:
            return
        vector_to_parameters(self._values.detach(), self._model.parameters())
        epoch = step * self._task.epochs / len(self._order)
        self._course.append(Point(epoch, now_s, self._task.score(self._model, self._test)))
