"""What the lab compares: things that train the same emulated model, a few steps at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from foreprop.core.codec import NONE, codec_of, takes
from foreprop.core.wire import HEADER_BYTES
from foreprop.session.composition import connect
from foreprop.session.session import Session
from foreprop_lab.lab.accelerator import EmulatedModel, Launches, OnDevice
from foreprop_lab.lab.ddptrace import DdpTrace
from foreprop_lab.setting.codecs import powersgd_rank, session_compression
from foreprop_lab.setting.labsetting import (
    CLIP_NORM,
    CLIPPED,
    DISCARDED_STEPS,
    LabSetting,
    foreprop_config,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A worker's steps by its device's clock, seconds: how long each took, and was idle.

    Where kernels are launched ``held_s`` is how long that waited for the interpreter.
    """

    step_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)


def means(lists: Sequence[Sequence[float]], *, harmonic: bool = False) -> list[float]:
    """Each step's mean over the workers of a block, the first steps left out.

    Workers that each train at a rate of their own have ``harmonic`` means.
    """
    mean = statistics.harmonic_mean if harmonic else statistics.fmean
    return [mean(values) for values in zip(*lists, strict=True)][DISCARDED_STEPS:]


class System(Protocol):
    """One system on one worker; all workers do the same at about the same time."""

    def steps(self, count: int, first: int = 1) -> Steps:
        """Make so many steps; ``first`` is the first one's number among those that are drawn."""

    def close(self) -> None: ...


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
    """Make steps, each from the end of a forward pass to the end of the next one.

    They have ``numbers`` among the steps that are drawn. ``waits_in_step`` says whether the
    optimizer's step waits for something, and so the device, too. If they ``clip`` it is by the
    global norm, as most scripts for transformers do.
    """
    clock = model.clock
    x = torch.ones(1, requires_grad=True)
    clock.restart()
    model.begin_step(numbers.start - 1)
    loss = forward(x).sum()
    steps = Steps()
    for number in numbers:
        model.begin_step(number)
        started, idle_before, held_before = clock.free_at, clock.idle_s, clock.held_s
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
        steps.held_s.append(clock.held_s - held_before)
    return steps


def _model(setting: LabSetting, rank: int) -> EmulatedModel:
    # every worker's device has times of its own, the same for all systems
    draw = None if setting.unevenness.is_even else setting.draw([rank])
    arrays = setting.profile.arrays_by_layer()
    launches = None if setting.launch_s is None else Launches(setting.launch_s)
    return EmulatedModel(setting.layers, draw, arrays=arrays, rank=rank, launches=launches)


def _sgd(model: EmulatedModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def codecs_in(session: Session, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    choices = session.config.codecs
    pairs = ((codec_of(name, choices), array) for name, array in named)
    return [codec if takes(codec, array.shape) else NONE for codec, array in pairs]


def counted_frames(session: Session) -> tuple[int, int]:
    stats = session.stats()
    frames = int(stats["pushes"] + stats["replies"])
    return int(stats["pushed_bytes"] + stats["reply_bytes"]) + HEADER_BYTES * frames, frames


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
        self._model = _model(setting, rank)
        if (codec := setting.codec_of(name)) is not None:
            names = [name for name, _ in self._model.named_parameters()]
            own["compression"] = session_compression(codec, setting.profile, names)
        config = foreprop_config(name, setting, **own)
        self._optimizer = _sgd(self._model)
        self._session = connect(self._model, self._optimizer, config)

    @property
    def slice_elems(self) -> int:
        """The slices' size as it is now, if it is found automatically."""
        return self._session.config.cut_elems(self._nodes)

    @property
    def codecs(self) -> list[str]:
        return codecs_in(self._session, list(self._model.named_parameters()))

    @property
    def counted_frames(self) -> tuple[int, int]:
        return counted_frames(self._session)

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
        self,
        setting: LabSetting,
        rank: int,
        *,
        bucket_bytes: int,
        trace: Path | None = None,
        hook: str | None = None,
    ) -> None:
        """Wrap a model, with one of torch's hooks by its name in `setting.codecs`."""
        self._model = _model(setting, rank)
        self._optimizer = _sgd(self._model)
        self._wrapped = DistributedDataParallel(self._model, bucket_cap_mb=bucket_bytes / 2**20)
        if hook is not None:
            _compress(self._wrapped, hook)
        self._trace = None if trace is None else DdpTrace(self._wrapped, trace, rank)

    def steps(self, count: int, first: int = 1) -> Steps:
        numbers = range(first, first + count)
        return train(self._model, self._wrapped, self._optimizer, numbers, trace=self._trace)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()


def _compress(wrapped: DistributedDataParallel, hook: str) -> None:
    """Register torch's own hook: casts, or PowerSGD (Vogels et al. 2019) from the third step on."""
    rank = powersgd_rank(hook)
    if rank is None:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def join_process_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
