"""An operation in a model's graph that calls a test, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable

import torch

looks: dict[str, Callable[[], None]] = {}
"""What is called: "forward" and "backward". The test puts it there, and takes it away."""


@torch.library.custom_op("foreprop_tests::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    """Calls what the test has left in `looks`, in both directions."""
    looks.get("forward", lambda: None)()
    return x.clone()


@torch.library.custom_op("foreprop_tests::look_back", mutates_args=())
def _look_back(x: torch.Tensor) -> torch.Tensor:
    looks.get("backward", lambda: None)()
    return x.clone()


@look.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@_look_back.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


look.register_autograd(lambda ctx, gradient: _look_back(gradient))
