"""Four steps of a small model whose first values are the same on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import foreprop
from foreprop.engine.world import World

SEEDING = threading.Lock()  # ranks are threads, and share torch's generator


def train(
    world: World,
    *,
    times: int = 1,
    before_step: Callable[[int], None] = lambda step: None,
    **changes: Any,
) -> list[torch.Tensor]:
    """The parameters afterwards. ``times``: how much wider the first layer is, both ways."""
    inputs = 6 * times
    with SEEDING:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(inputs, 8 * times), nn.Tanh(), nn.Linear(8 * times, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen = {"join_timeout_s": 20.0, "step_timeout_s": 20.0, **changes}
    with foreprop.parallelize(model, optimizer, world=world, **chosen):
        for step in range(4):
            before_step(step)
            optimizer.zero_grad()
            model(torch.full((5, inputs), 0.1 * (world.rank + step))).square().sum().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]
