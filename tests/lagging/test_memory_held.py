"""What a worker holds on its device and pinned on its host: the formulas of docs/devices.md."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from foreprop.engine import gpumemory
from foreprop.engine.asyncdevice import can_pin
from tests.devices import scenarios
from tests.devices.training import Scenario
from tests.lagging.device import DEVICE, MEMORY, lagging
from tests.lagging.streams import synchronize
from tests.lagging.training import train

ELEMS = sum(parameter.numel() for parameter in scenarios.layers().parameters())
PARAMETERS_BYTES = 4 * ELEMS
"""P: the parameters', of a model in float32."""


def train_and_look(model: Any, optimizer: Any, batches: Any, session: Any) -> dict[str, float]:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    session.flush()
    synchronize()
    inputs = sum(part.nbytes for batch in batches for part in batch)
    return {
        "pinned": sum(MEMORY.pinned.values()) / PARAMETERS_BYTES,
        "on device": (MEMORY.held_bytes - inputs) / PARAMETERS_BYTES,
    }


@pytest.mark.parametrize(
    ("settings", "pinned", "on_device"),
    [
        ({"architecture": "p2p", "update": "servers"}, 2, 2),
        ({"architecture": "p2p", "update": "workers"}, 3, 4),
        ({"architecture": "ring", "update": "servers"}, 1, 4),
    ],
)
def test_bytes_held(
    settings: dict[str, Any], pinned: float, on_device: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In P. Adam's two averages are on the servers' hosts, or with ``update="workers"`` here."""
    monkeypatch.setattr(gpumemory, "_NUMBERS", 1)  # of 8 bytes, for all parameters together
    scenario = Scenario(
        scenarios.layers, train_and_look, scenarios.adam, settings, ranks=1, steps=3
    )
    gc.collect()  # of other tests
    assert not MEMORY.pinned
    assert not MEMORY.held_bytes
    with lagging(seed=4):
        (found,) = train(scenario, DEVICE)
    assert found[".found.pinned"].item() == pytest.approx(pinned, rel=0.02)
    assert found[".found.on device"].item() == pytest.approx(on_device, rel=0.1)


@pytest.mark.parametrize(
    ("update", "share"),
    [
        *[("servers", 0.6), ("workers", 0.0)],
        *[
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("servers", 0), ("workers", 0.6)]
        ],
    ],
)
def test_so_much_is_pinned_and_no_more(update: str, share: float) -> None:
    """The rest of the copies goes through ordinary memory: what comes is the same."""
    limit = int(share * PARAMETERS_BYTES)
    settings = {"architecture": "p2p", "update": update, "pinned_bytes": limit}
    scenario = Scenario(
        scenarios.layers, train_and_look, scenarios.adam, settings, ranks=1, steps=3
    )
    gc.collect()
    with lagging():
        can_pin()  # pins something, in the first test of a process that asks
    with lagging(seed=5):
        (found,) = train(scenario, DEVICE)
        most = MEMORY.most_pinned_bytes
    assert most <= limit
    assert most > 0.5 * limit or not limit
    (plain,) = train(scenario, "cpu")
    for name, value in plain.items():
        assert name.startswith(".found") or torch.equal(found[name], value), name
