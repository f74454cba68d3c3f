"""Gradients that stay on the device: `ring` as with NCCL, whose sums gloo makes here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from foreprop.backends import ring
from foreprop.features.collectives.group import Group
from tests.devices import scenarios
from tests.devices.training import Scenario
from tests.lagging.training import check_on_device, train
from tests.tiers import long_cases

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunk_elems": 7, "chunks_in_flight": 2},
    "clip-norm-bfloat16": {"clip_grad_norm": 0.05, "wire_dtype": "bfloat16"},
    "ema": {"ema": 0.9},
}


class _Sum:
    """As NCCL's: what it has summed is in the tensor when the waiting thread's stream is there."""

    def __init__(self, group: Any, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory().copy_(tensor)
        self._work = group.allreduce([self._host])

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._host, non_blocking=True)


class _Nccl:
    def __init__(self, group: Any) -> None:
        self._group = group

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> _Sum:
        assert tensors[0].device.type == "lagging"
        return _Sum(self._group, tensors[0])

    def abort(self) -> None:
        """gloo's ends with its group."""


def _scenario(name: str) -> Scenario:
    loop = scenarios.averaging if name == "ema" else scenarios.plain
    model = scenarios.Uneven if name == "plain" else scenarios.layers
    settings = {"architecture": "ring", **SETTINGS[name]}
    return Scenario(model, loop, scenarios.adam, settings, steps=5)


@cache
def _on_cpu(name: str) -> Sequence[dict[str, torch.Tensor]]:
    return train(_scenario(name), "cpu")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1000))
    monkeypatch.setattr(
        ring, "usable_gpu", lambda found, _: f"GPU-{next(numbers)}" if found else "-has none"
    )
    monkeypatch.setattr(Group, "_open_nccl", lambda group, gpu: _Nccl(group._opened))


MANNERS: dict[str, dict[str, str]] = {"any": {}, "late": {"manner": "late"}}
OFTEN = ["any-plain", "any-clip-norm-bfloat16", "late-chunks", "late-ema"]
CASES = [f"{manner}-{name}" for manner in MANNERS for name in SETTINGS]


@pytest.mark.parametrize("case", [*OFTEN, *long_cases(*[c for c in CASES if c not in OFTEN])])
def test_the_same_bits_as_on_the_cpu(case: str, request: pytest.FixtureRequest) -> None:
    manner, _, name = case.partition("-")
    wanted = _on_cpu(name)
    request.getfixturevalue("nccl")
    check_on_device(_scenario(name), wanted, seed=len(name), **MANNERS[manner])
