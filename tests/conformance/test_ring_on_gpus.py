"""The way of gradients that stay on GPUs, with host memory in their place and gloo for NCCL.

What only a GPU can show (streams, and NCCL itself) is not tested here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import foreprop
from foreprop.backends import ring
from foreprop.config import Config
from foreprop.engine import gpumemory, memory
from foreprop.engine.asyncdevice import TorchAccelerator
from foreprop.engine.world import World
from foreprop.errors import ConfigError, PeerLost
from foreprop.features.collectives.group import Group
from foreprop.params import setup
from tests.cluster import run_cluster
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    check_same_bits,
    check_same_optimizer_state,
    run_foreprop,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs


class _Event:
    """Of a kernel that takes a while."""

    def __init__(self) -> None:
        self._done_at = time.monotonic() + 0.002

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._done_at - time.monotonic()))


class _Device(TorchAccelerator):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def mark(self, *, timed: bool = False) -> _Event:
        return _Event()

    def start(self, target: torch.Tensor, source: torch.Tensor, here: Any) -> _Event:
        raise AssertionError("nothing is copied to the host")


class _Work:
    """As `collectives.gpu.GpuWork`."""

    device = torch.device("cpu")
    on_host = False
    entered: ClassVar[set[int]] = set()

    def __init__(self, device: torch.device) -> None:
        assert device == self.device

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        self.entered.add(threading.get_ident())
        yield

    def flat(self, part: Any, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(part, torch.Tensor)
        assert threading.get_ident() in self.entered
        elements: torch.Tensor = part.view(dtype)
        return elements

    def keep(self, gradient: torch.Tensor) -> None:
        assert threading.get_ident() in self.entered

    def finish(self) -> None:
        assert threading.get_ident() in self.entered


@pytest.fixture(autouse=True)
def no_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of parameters on the host, as which those of GPUs pass here."""
    monkeypatch.setattr(setup.Setup, "packs", lambda *_: ())


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every rank has a GPU that is host memory; the ranks that have opened NCCL."""
    opened: list[int] = []

    class Factory(setup.MemoryFactory):
        def __init__(self, config: Config, *, stays: bool = False) -> None:
            super().__init__(config, stays=True)

        def memory_of(self, parameter: torch.Tensor) -> memory.Memory:
            if parameter.device not in self._stagers:
                self._stagers[parameter.device] = gpumemory.Stager(_Device())
            return gpumemory.DeviceMemory(self._stagers[parameter.device])

    def open_nccl(group: Group, gpu: torch.device) -> Any:
        opened.append(group.rank)
        return _Aborting(group._opened)

    monkeypatch.setattr(ring, "GpuWork", _Work)
    monkeypatch.setattr(ring, "MemoryFactory", Factory)
    numbers = iter(range(100))
    monkeypatch.setattr(ring, "usable_gpu", lambda *_: f"GPU-{next(numbers)}")
    monkeypatch.setattr(Group, "_open_nccl", open_nccl)
    return opened


class _Aborting:
    def __init__(self, group: Any) -> None:
        self.allreduce = group.allreduce

    def abort(self) -> None:
        """gloo's does nothing either."""


def _model() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    )
    model[0].to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Linear(5, 9), nn.Unflatten(1, (1, 3, 3)), *model)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_elems": 7, "chunks_in_flight": 2, "clip_grad_norm": 0.05},
        {"clip_grad_value": 0.01, "ema": 0.9},
        *long_cases({}, {"chunk_elems": 7, "chunks_in_flight": 2}),
        *long_cases({"clip_grad_norm": 0.05}, {"wire_dtype": "bfloat16"}),
    ],
    ids=lambda settings: "-".join(settings) or "default",
)
def test_the_same_bits_as_through_host_memory(
    settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    build = with_sgd(_model, weight_decay=0.01)
    by_rank = batches_of(3, count=4)
    wanted = run_foreprop(build, train_classifier, by_rank, architecture="ring", **settings)
    opened = request.getfixturevalue("gpus")
    got = run_foreprop(build, train_classifier, by_rank, architecture="ring", **settings)
    assert sorted(opened) == [0, 1, 2]
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours.model, theirs.model)
        check_same_optimizer_state(ours.optimizer, theirs.optimizer)


def test_a_change_by_hand_counts(gpus: list[int]) -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        train_classifier(model, optimizer, batches[:2])
        str(model[0].weight)  # waits
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        train_classifier(model, optimizer, batches[2:])

    build, by_rank = with_sgd(_model), batches_of(2, count=4)
    got = run_foreprop(build, loop, by_rank, architecture="ring")
    with pytest.MonkeyPatch.context() as undo:
        undo.setattr(ring, "usable_gpu", lambda *_: "-has none")
        undo.setattr(ring, "MemoryFactory", setup.MemoryFactory)
        wanted = run_foreprop(build, loop, by_rank, architecture="ring")
    check_same_bits(got[0].model, wanted[0].model)
    assert sorted(gpus) == [0, 1]


def test_a_rank_that_fails_ends_the_others(gpus: list[int]) -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd(_model), world.rank)
        settings: dict[str, Any] = {"architecture": "ring", "step_timeout_s": 20}
        with foreprop.parallelize(model, optimizer, world=world, **settings):
            train_classifier(model, optimizer, batches_of(1)[0][:2])
            if world.rank == 1:
                raise ValueError("of rank 1")
            train_classifier(model, optimizer, batches_of(1)[0])

    with pytest.raises((ValueError, PeerLost), match="of rank 1"):
        run_cluster(2, work)


def test_nccl_without_gpus_is_an_error_that_names_a_rank() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd(_model), world.rank)
        settings: dict[str, Any] = {"architecture": "ring", "collectives": "nccl"}
        foreprop.parallelize(model, optimizer, world=world, **settings)

    with pytest.raises(ConfigError, match="'nccl', but rank 0 has parameters on cpu"):
        run_cluster(2, work)
