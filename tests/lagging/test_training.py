"""What trains on the CPU trains on a device, with the same bits, however it lags."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.engine.asyncdevice import TorchAccelerator
from foreprop.engine.gpumemory import AsyncStagedMemory
from foreprop.errors import ConfigError
from tests.devices.scenarios import SCENARIOS, layers, plain
from tests.devices.training import Scenario
from tests.lagging.device import DEVICE, lagging
from tests.lagging.training import check_on_device, train

MORE = 5
"""Seeds of each scenario, in `make test-all`: more than 200 in all."""
NAMES = list(SCENARIOS)
CASES = list(
    enumerate(
        [
            "convolutions-adam",
            "tied",
            "accumulating",
            "checkpointing",
            "workers-scaling",
            "workers-gan",
            "autocast",
            "clip-norm",
            "ema",
            "bfloat16-wire",
            "bfloat16-parameters",
            "local-aggregation-workers",
            "ring-clip-norm-bfloat16",
            "ring-reading",
            "ring-codec",
            "tables-workers",
            "tables-remote",
            "sparse-dense",
            "hybrid",
            "codec-int8",
            "staleness",
            "pinned-some",
        ]
    )
)
"""Seeds, and what no other test of `make test` trains on the device."""
LATE = ["zeroing", "monitoring", "looking-back", "workers-uneven", "workers-reading", "ring-uneven"]
"""Where a missing wait shows on a device that waits for nobody."""
CASES_MORE = [
    (100 + number * MORE + seed, name) for number, name in enumerate(NAMES) for seed in range(MORE)
]


@cache
def on_cpu(name: str) -> Sequence[dict[str, torch.Tensor]]:
    return train(SCENARIOS[name], "cpu")


@pytest.mark.parametrize("name", LATE)
def test_the_same_bits_on_a_device_that_does_nothing_until_somebody_waits(name: str) -> None:
    check_on_device(SCENARIOS[name], on_cpu(name), seed=0, manner="late")


@pytest.fixture
def held_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient reaches the host before somebody waits for one."""
    released = threading.Event()
    start, await_staged = TorchAccelerator.start, AsyncStagedMemory.await_staged

    def hold(device: Any, *given: Any) -> Any:
        released.clear()
        device._copying.line.put(lambda: released.wait(5))
        return start(device, *given)

    def release(memory: AsyncStagedMemory) -> None:
        released.set()
        await_staged(memory)

    monkeypatch.setattr(TorchAccelerator, "start", hold)
    monkeypatch.setattr(AsyncStagedMemory, "await_staged", release)


@pytest.mark.parametrize("name", ["looking-back", "zeroing"])
@pytest.mark.usefixtures("held_copies")
def test_the_same_bits_where_gradients_are_copied_as_late_as_can_be(name: str) -> None:
    check_on_device(SCENARIOS[name], on_cpu(name), seed=0, manner="eager")


@pytest.mark.parametrize(
    ("seed", "name"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in CASES_MORE)],
)
def test_the_same_bits_as_on_the_cpu(name: str, seed: int) -> None:
    check_on_device(SCENARIOS[name], on_cpu(name), seed)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=4)
def test_any_seed_will_do(seed: int) -> None:
    check_on_device(SCENARIOS["layers"], on_cpu("layers"), seed)


def test_seeds_are_many() -> None:
    assert len({seed for seed, _ in CASES_MORE}) >= 200


def test_what_is_for_host_memory_only_is_refused() -> None:
    late = Scenario(layers, plain, settings={"architecture": "p2p", "staleness": "late"}, ranks=1)
    with (
        lagging(),
        pytest.raises(ConfigError, match="staleness is 'late', and a parameter is on"),
    ):
        train(late, DEVICE)
