"""What `parallelize` says of arguments of the wrong kind, and of those that do nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from foreprop.config import LOGGER
from foreprop.config.environment import promised_ranks
from foreprop.errors import ConfigError

_KINDS = {
    "model": ("torch.nn.Module", torch.nn.Module),
    "optimizer": ("torch.optim.Optimizer", torch.optim.Optimizer),
    "scaler": ("torch.amp.GradScaler", torch.amp.GradScaler),
}


def refuse(**given: object) -> None:
    """Raises `ConfigError` that names the first one which is not what it must be."""
    for name, value in given.items():
        wanted, kind = _KINDS[name]
        if not isinstance(value, kind) and (value is not None or name == "model"):
            raise ConfigError(f"{name} is a {type(value).__name__}; it must be a {wanted}")


@functools.cache
def report_promised() -> None:
    """A launcher has started several processes, but each is a world of one. Once per process."""
    if (promised := promised_ranks()) is not None:
        LOGGER.warning(
            "%s is %d, but this process trains alone, as RANK and WORLD_SIZE do not say who the"
            " others are: start it by torchrun or `foreprop run` (docs/recipes.md)",
            *promised,
        )


def idle(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> str | None:
    """A line about a model and optimizer without any parameter that requires a gradient."""
    if optimizer is not None and _trains(p for g in optimizer.param_groups for p in g["params"]):
        return None
    in_model = _trains(model.parameters())
    if optimizer is None and in_model:
        return None
    what = f"the optimizer, {type(optimizer).__name__}," if in_model else type(model).__name__
    return f"nothing is trained: {what} has no parameter that requires a gradient"


def _trains(parameters: Iterable[torch.Tensor]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)
