"""What scheduling costs beyond the bytes: per slice, and per waiting parameter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from foreprop.config import Config
from foreprop.params.waiting import make_wait, stop_waiting
from foreprop.session.composition import connect
from foreprop.session.replicas import ReplicaCheck
from foreprop.session.session import ConnectedSession
from foreprop_lab.benchmarks.wire import WirePair, lonely_world

_WARM_UP = 3
"""Steps that do not count. A server loads what updates need for a second or two: measure many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingCost:
    """CPU microseconds per slice and step of slices so small that their bytes cost nothing."""

    worker_us_per_slice: float
    server_us_per_slice: float
    step_us_per_slice: float


def measure_scheduling(*, slices: int, steps: int) -> SchedulingCost:
    """Measure the CPU time of both processes per slice: threads, locks, system calls, optimizer.

    Those of the Python plane, where a server is a process.
    """
    pair = WirePair(slices, Config.resolve("p3", slice_elems=16, plane="python"))
    worker, server = psutil.Process(), psutil.Process(pair.server_pid)
    try:
        for _ in range(_WARM_UP):
            pair.step()
        before = _cpu_s(worker), _cpu_s(server)
        seconds = [pair.step() for _ in range(steps)]
        after = _cpu_s(worker), _cpu_s(server)
    finally:
        pair.close()
    per_slice = 1e6 / (slices * steps)
    return SchedulingCost(
        worker_us_per_slice=(after[0] - before[0]) * per_slice,
        server_us_per_slice=(after[1] - before[1]) * per_slice,
        step_us_per_slice=statistics.median(seconds) * 1e6 / slices,
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCost:
    """Microseconds per parameter and step when the reply is there already."""

    first_use_us: float
    """A first use, less the same use of an ordinary parameter."""
    swap_us: float
    """Making the parameter wait, after its push."""

    @property
    def total_us(self) -> float:
        return self.first_use_us + self.swap_us


def measure_replica_check(sizes: Sequence[int]) -> float:
    """The microseconds per step of ``check_replicas`` for arrays of so many float32.

    It is the mean over a window, with what is published of it, after a first one of one step.
    """
    model = torch.nn.Module()
    model.arrays = torch.nn.ParameterList(torch.zeros(size) for size in sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = Config.resolve("p3")
    steps = config.check_replicas or 0
    with connect(model, optimizer, config, world=lonely_world()) as session:
        check = ReplicaCheck(session._training)
        check.look(0)
        started = time.perf_counter()
        for step in range(1, steps + 1):
            check.look(step)
        return (time.perf_counter() - started) * 1e6 / steps


class _Scalars(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.scalars = torch.nn.ParameterList(torch.zeros(1) for _ in range(count))


def measure_waiting(*, parameters: int, steps: int) -> WaitingCost:
    """Medians over steps of a real session whose replies have all come before the first use."""
    model = _Scalars(parameters)
    scalars = list(model.scalars)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first_uses, ordinary_uses = [], []
    with connect(model, optimizer, Config.resolve("p3"), world=lonely_world()) as session:
        for scalar in scalars:
            scalar.grad = torch.ones_like(scalar)
        for _ in range(steps + _WARM_UP):
            optimizer.step()
            while not all(
                session._training.backends.engines[0].is_complete(i) for i in range(parameters)
            ):
                time.sleep(0.001)
            first_uses.append(_use_all(scalars))
            ordinary_uses.append(_use_all(scalars))
        swap_us = _swap_us(session, scalars)
    first, ordinary = (
        statistics.median(times[_WARM_UP:]) * 1e6 / parameters
        for times in (first_uses, ordinary_uses)
    )
    return WaitingCost(first_use_us=first - ordinary, swap_us=swap_us)


def _use_all(scalars: list[torch.nn.Parameter]) -> float:
    started = time.perf_counter()
    for scalar in scalars:
        torch.neg(scalar)
    return time.perf_counter() - started


def _swap_us(session: ConnectedSession, scalars: list[torch.nn.Parameter]) -> float:
    times = []
    parameters: list[Any] = session._training.parameters
    for _ in range(5):
        started = time.perf_counter()
        for scalar, pending in zip(scalars, parameters, strict=True):
            make_wait(scalar, pending)
        times.append(time.perf_counter() - started)
        for scalar in scalars:
            stop_waiting(scalar)
    return statistics.median(times) * 1e6 / len(scalars)
