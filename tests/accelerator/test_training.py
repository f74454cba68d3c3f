"""On a real accelerator: however late it is, the same bits, which are near the CPU's.

The lagging device (`tests/lagging`) shows the same with the CPU's own kernels. Here the kernels,
streams and copies are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.accelerator.here import Delays, device_or_skip, own_stream
from tests.devices.scenarios import SCENARIOS
from tests.devices.training import check_same, train

DEVICE = device_or_skip()
SEEDS = 3
ROUGH = {"codec-int8", "codec-topk", "convolutions-adam"}
"""A rounding more, and another level or element is chosen; or Adam makes a step of what rounding
leaves of a gradient that is zero, of a bias in front of a norm."""
HALVES = {"bfloat16-wire", "bfloat16-parameters", "ring-codec", "ring-clip-norm-bfloat16"}
HALVES |= {"autocast"}
FLOAT32, BFLOAT16, LOOSE = (1e-3, 1e-4), (5e-2, 2e-2), (0.2, 0.1)
"""Relative and absolute tolerances to the CPU's values."""


pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")


@pytest.fixture(autouse=True)
def _same_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that give the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@cache
def on_cpu(name: str) -> Sequence[Mapping[str, torch.Tensor]]:
    return train(SCENARIOS[name], "cpu")


def _here(name: str, seed: int | None) -> Sequence[Mapping[str, torch.Tensor]]:
    on: Any = partial(own_stream, DEVICE)
    if seed is None:
        return train(SCENARIOS[name], str(DEVICE), on_stream=on)
    late: AbstractContextManager[None] = Delays(DEVICE, seed).applied(computing=name != "compiled")
    with late:
        return train(SCENARIOS[name], str(DEVICE), on_stream=on)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_the_same_bits_however_late_the_device_is(name: str) -> None:
    wanted = _here(name, None)
    _check_near(wanted, on_cpu(name), *_tolerances(name))
    for seed in range(SEEDS):
        check_same(_here(name, seed), wanted)


def _tolerances(name: str) -> tuple[float, float]:
    if name in ROUGH:
        return LOOSE
    return BFLOAT16 if name in HALVES else FLOAT32


def _check_near(
    got: Sequence[Mapping[str, torch.Tensor]],
    wanted: Sequence[Mapping[str, torch.Tensor]],
    rtol: float,
    atol: float,
) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            torch.testing.assert_close(
                ours[key],
                value,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=partial("{}: {}".format, key),
            )
