"""A node of `benchmarks.gpu`: trains one model with each system, a block of steps at a time."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from foreprop.config import Config
from foreprop.engine.asyncdevice import TorchAccelerator
from foreprop.session.composition import connect
from foreprop.session.session import Session
from foreprop.tools.compare.ddp import bf16_hook
from foreprop_lab.lab.network import interface_bytes
from foreprop_lab.lab.systems import join_process_group

PLAIN = ("alone", "ddp", "ddp-bf16")
"""Systems without foreprop."""
DISCARDED_STEPS = 2
"""The steps of each block that do not count."""
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
_VOCABULARY, _WIDTH, _LENGTH = 8192, 768, 256


class Setting(NamedTuple):
    model: str
    batch: int
    """Samples of each node."""
    half: bool
    """Whether the layers compute in bfloat16 (autocast)."""
    compiled: bool
    device: str


class Transformer(nn.Module):
    """A decoder of 12 layers, 98 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, 12, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(12)
        )
        self.last = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.last(hidden.mean(1))
        return result


def make_model(name: str) -> nn.Module:
    if name == "transformer":
        return Transformer()
    if name == "small":
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 16), nn.Linear(16, 1000))
    found: nn.Module = getattr(importlib.import_module("torchvision.models"), name)()
    return found


def make_batch(setting: Setting, rank: int, device: torch.device) -> tuple[Any, torch.Tensor]:
    numbers = torch.Generator().manual_seed(rank)
    if setting.model == "transformer":
        x = torch.randint(_VOCABULARY, (setting.batch, _LENGTH), generator=numbers)
        y = torch.randint(_VOCABULARY, (setting.batch,), generator=numbers)
        return x.to(device), y.to(device)
    x = torch.randn(setting.batch, 3, 224, 224, generator=numbers)
    y = torch.randint(1000, (setting.batch,), generator=numbers)
    return x.to(device).to(memory_format=torch.channels_last), y.to(device)


def seconds_between(marks: Sequence[Any]) -> list[float]:
    """The times between marks, once the last one has been reached."""
    pairs = list(itertools.pairwise(marks))
    if isinstance(marks[-1], float):
        return [later - sooner for sooner, later in pairs]
    marks[-1].synchronize()
    return [sooner.elapsed_time(later) / 1e3 for sooner, later in pairs]


class Training:
    """One system on one node."""

    def __init__(self, system: str, setting: Setting, rank: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device
        self._half = setting.half
        self._batch = make_batch(setting, rank, device)
        model = make_model(setting.model).to(device)
        if setting.model != "transformer":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._session: Session | None = None
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self._forward: Any = model
        if system.startswith("ddp"):
            self._forward = _wrapped(model, bf16=system == "ddp-bf16")
        elif system != "alone":
            self._session = connect(model, self._optimizer, config_of(system))
        if setting.compiled:
            self._forward = torch.compile(self._forward)
        self._model = model

    def steps(self, count: int) -> list[float]:
        """Make steps; returns the seconds of each."""
        x, y = self._batch
        if self._session is not None:
            self._session.flush()
        marks = []
        loss = self._loss(x, y)
        for _ in range(count):
            marks.append(self._mark())
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            loss = self._loss(x, y)
        marks.append(self._mark())
        return seconds_between(marks)

    def _loss(self, x: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            found = self._forward(x)
        return F.cross_entropy(found.float(), y)

    def _mark(self) -> Any:
        """A mark behind what this thread has queued so far: an event, or the time on a CPU."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def sum(self) -> float:
        """The sum of all parameters, which is the same on all ranks."""
        if self._session is not None:
            self._session.flush()
        return float(sum(p.detach().double().sum() for p in self._model.parameters()))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def _wrapped(model: nn.Module, *, bf16: bool) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    join_process_group()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if bf16:
        wrapped.register_comm_hook(None, bf16_hook)
    return wrapped


def config_of(system: str) -> Config:
    """The settings of a system: ``p3``, ``p3-bf16``, ``p3+auto``, ``p3@100000``, ``ring+int8``.

    Raises `ConfigError`, and ValueError for a slice's size that is no number.
    """
    name, _, elems = system.partition("@")
    name, _, codec = name.partition("+")
    base = name.removesuffix("-bf16")
    settings: dict[str, Any] = {"compression": codec} if codec else {}
    if base != name:
        settings["wire_dtype"] = "bfloat16"
    if elems:
        settings["slice_elems"] = int(elems)
    if base == "ring":
        return Config.resolve(architecture="ring", **settings)
    return Config.resolve(base, architecture="p2p", **settings)


def _see_own_processes() -> None:
    """Mount the namespace's own ``/proc``: CUDA looks itself up there by its number in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed: int = libc.unshare(_CLONE_NEWNS)
    failed = failed or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    failed = failed or libc.mount(b"proc", b"/proc", b"proc", 0, None)
    if failed:
        raise OSError(ctypes.get_errno(), "no mount of the node's own /proc")


def serve(rank: int, connection: Connection, argument: Any) -> None:
    """Answer the coordinator's requests until it closes the connection."""
    setting: Setting = argument
    _see_own_processes()
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")  # TF32, as most do
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device(setting.device)
    systems: dict[str, Training] = {}
    while True:
        kind, name, *details = connection.recv()
        answer: Any = None
        if kind == "build":
            systems[name] = Training(name, setting, rank, device)
        elif kind == "steps":
            before = interface_bytes()[0]
            steps = systems[name].steps(*details)
            sent = interface_bytes()[0] - before
            answer = steps[DISCARDED_STEPS:], sent / len(steps)
        elif kind == "device":
            answer = TorchAccelerator(device).name
        elif kind == "sum":
            answer = systems[name].sum()
        elif kind == "close":
            systems.pop(name).close()
        connection.send(answer)
