"""What trains on the CPU trains on a device, with the same bits, however it lags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from tests.lagging.scenarios import SCENARIOS
from tests.lagging.training import check_on_device, train

SEEDS = 10
MORE = 8
"""Seeds of each scenario, in `make test-all`: 208 in all."""
NAMES = list(SCENARIOS)
CASES = [(name, number % SEEDS) for number, name in enumerate(NAMES)]
CASES_MORE = [
    (name, 100 + number * MORE + seed) for number, name in enumerate(NAMES) for seed in range(MORE)
]


@cache
def on_cpu(name: str) -> Sequence[dict[str, torch.Tensor]]:
    return train(SCENARIOS[name], "cpu")


@pytest.mark.parametrize(
    ("name", "seed"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in CASES_MORE)],
)
def test_the_same_bits_as_on_the_cpu(name: str, seed: int) -> None:
    check_on_device(SCENARIOS[name], on_cpu(name), seed)


@pytest.mark.parametrize("seed", range(1, SEEDS))
def test_any_seed_will_do(seed: int) -> None:
    check_on_device(SCENARIOS["layers"], on_cpu("layers"), seed)
