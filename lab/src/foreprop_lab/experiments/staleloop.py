"""Asynchronous workers on a clock: `core.staleness` decides who may begin which step when.

A training has one slice. A worker computes with the values that it has read, and pushes; the server
updates and answers at once. Only the workers' steps take time here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import FrameSent, PushArrived, SendFrame
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.staleness import Staleness, rule_of


class StaleTraining(Protocol):
    """The training whose methods `StaleLoop` calls."""

    def compute(self, rank: int, step: int) -> None:
        """Compute the worker's gradient from the values that it has read; steps count from 1."""

    def update(self, ranks: Sequence[int], now_s: float) -> None:
        """Update the values by these workers' gradients."""

    def read(self, rank: int, step: int) -> None:
        """Give the worker the values after its step; it then begins the next one."""


class StaleLoop:
    """A loop over the workers' steps; ``step_s`` says how long each step of a rank takes."""

    def __init__(
        self,
        training: StaleTraining,
        *,
        elems: int,
        workers: int,
        staleness: Staleness,
        step_s: Callable[[int, int], float],
    ) -> None:
        self._training = training
        self._step_s = step_s
        self._server = ServerMachine(
            [Slice(0, 0, 0, elems, 0)],
            index=0,
            workers=workers,
            order="priority",
            names=["values"],
            closing=rule_of(staleness),
        )
        self._events: list[tuple[float, int, int, int]] = []  # when, number, rank, step
        self._numbers = itertools.count()
        for rank in range(workers):
            self._begin(0.0, rank, 1)

    def run(self, goes_on: Callable[[float], bool]) -> None:
        """Run while ``goes_on`` is true of the time at which the next gradient is computed."""
        while self._events and goes_on(self._events[0][0]):
            now_s, _, rank, step = heapq.heappop(self._events)
            self._training.compute(rank, step)
            self._handle(now_s, PushArrived(rank, 0, step, 0, 0))

    def _begin(self, now_s: float, rank: int, step: int) -> None:
        done_s = now_s + self._step_s(rank, step)
        heapq.heappush(self._events, (done_s, next(self._numbers), rank, step))

    def _handle(self, now_s: float, event: Any) -> None:
        for instruction in self._server.handle(event):
            if isinstance(instruction, UpdateSlice):
                self._training.update(instruction.ranks, now_s)
                self._handle(now_s, SliceUpdated())
            elif isinstance(instruction, SendFrame):
                rank, step = instruction.peer, instruction.step
                self._training.read(rank, step)
                self._begin(now_s, rank, step + 1)
                self._handle(now_s, FrameSent(rank))
