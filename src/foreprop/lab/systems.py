"""What the lab compares: things that train the same emulated model, a few steps at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from foreprop.lab.accelerator import DeviceClock, EmulatedModel
from foreprop.session.session import connect
from foreprop.workload.setting import (
    CLIP_NORM,
    CLIPPED,
    DISCARDED_STEPS,
    LabSetting,
)
from foreprop.workload.systemconfig import foreprop_config

if TYPE_CHECKING:
    from foreprop.lab.ddptrace import DdpTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of one worker by its device's clock, seconds: whole, and the part that it was idle."""

    step_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)


def means(lists: Sequence[Sequence[float]], *, apart: bool = False) -> list[float]:
    """Of each step of a block over the workers, the first ones left out.

    ``apart``: harmonic ones, of workers each at a rate of its own.
    """
    mean = statistics.harmonic_mean if apart else statistics.fmean
    return [mean(values) for values in zip(*lists, strict=True)][DISCARDED_STEPS:]


class System(Protocol):
    """One system on one worker; all are told to do the same at about the same time."""

    def steps(self, count: int, first: int = 1) -> Steps:
        """So many; ``first`` is the number of the first among those that are drawn."""

    def close(self) -> None: ...


class OnDevice(Protocol):
    """A model whose layers occupy the device."""

    @property
    def clock(self) -> DeviceClock: ...
    def begin_step(self, number: int) -> None: ...
    def end_backward(self) -> None: ...
    def parameters(self) -> Iterable[torch.Tensor]: ...


def train(
    model: OnDevice,
    forward: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    numbers: range,
    *,
    waits_in_step: Callable[[], bool] = lambda: False,
    clip: bool = False,
    trace: DdpTrace | None = None,
) -> Steps:
    """Steps from the end of a forward pass to the end of the next one.

    ``numbers``: of the steps among those that are drawn. ``waits_in_step``: whether the optimizer's
    step waits for something, and so the device, too.
    ``clip``: by the global norm, as most scripts for transformers do.
    """
    clock = model.clock
    x = torch.ones(1, requires_grad=True)
    clock.restart()
    model.begin_step(numbers.start - 1)
    loss = forward(x).sum()
    steps = Steps()
    for number in numbers:
        model.begin_step(number)
        started, idle_before = clock.free_at, clock.idle_s
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        model.end_backward()
        if trace is not None:
            trace.end_backward()
        if clip:
            clipped_at = time.monotonic()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            clock.waited(clipped_at)
        waits, stepped_at = waits_in_step(), time.monotonic()
        optimizer.step()
        if waits:
            clock.waited(stepped_at)
        loss = forward(x).sum()
        steps.step_s.append(clock.free_at - started)
        steps.waited_s.append(clock.idle_s - idle_before)
    return steps


def _model(setting: LabSetting, rank: int) -> EmulatedModel:
    """Every worker's device has its own times, and each system's the same."""
    draw = None if setting.unevenness.is_even else setting.draw([rank])
    return EmulatedModel(setting.layers, draw)


def _sgd(model: EmulatedModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class ForepropSystem:
    """foreprop with one of its presets, or with all-reduce."""

    def __init__(self, name: str, setting: LabSetting, rank: int, *, paced: bool) -> None:
        self._nodes = setting.nodes
        self._clips = CLIPPED.get(name) == "auto"
        own: dict[str, Any] = {}
        if setting.trace is not None:
            own["trace"] = str(setting.trace / name)
        if paced:
            node = rank // setting.workers_per_node
            own["link_rate_bits_per_s"] = setting.network.rate_of(node)
        config = foreprop_config(name, setting, **own)
        self._model = _model(setting, rank)
        self._optimizer = _sgd(self._model)
        self._session = connect(self._model, self._optimizer, config)

    @property
    def slice_elems(self) -> int:
        """As it is now, if it is found automatically."""
        return self._session.config.cut_elems(self._nodes)

    def steps(self, count: int, first: int = 1) -> Steps:
        self._session.flush()
        return train(
            self._model,
            self._model,
            self._optimizer,
            range(first, first + count),
            waits_in_step=lambda: self._session.planning,
            clip=self._clips,
        )

    def close(self) -> None:
        self._session.close()


class DdpSystem:
    """torch's DistributedDataParallel on gloo."""

    def __init__(
        self, setting: LabSetting, rank: int, *, bucket_bytes: int, trace: Path | None = None
    ) -> None:
        self._model = _model(setting, rank)
        self._optimizer = _sgd(self._model)
        self._wrapped = DistributedDataParallel(self._model, bucket_cap_mb=bucket_bytes / 2**20)
        self._trace: DdpTrace | None = None
        if trace is not None:
            from foreprop.lab.ddptrace import DdpTrace

            self._trace = DdpTrace(self._wrapped, trace, rank)

    def steps(self, count: int, first: int = 1) -> Steps:
        numbers = range(first, first + count)
        return train(self._model, self._wrapped, self._optimizer, numbers, trace=self._trace)

    def close(self) -> None:
        """Nothing runs between its steps, but what writes its trace."""
        if self._trace is not None:
            self._trace.close()


def join_process_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
