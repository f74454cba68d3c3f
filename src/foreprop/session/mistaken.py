"""What `parallelize` says of arguments of the wrong kind, and of those that do nothing."""

from __future__ import annotations

import functools

import torch

from foreprop.config import LOGGER
from foreprop.config.promises import promised_ranks
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


def report_idle(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """If the optimizer, or the model without one, has no parameter that requires a gradient."""
    in_model = any(parameter.requires_grad for parameter in model.parameters())
    groups = [] if optimizer is None else optimizer.param_groups
    trains = in_model if optimizer is None else False
    if trains or any(p.requires_grad for group in groups for p in group["params"]):
        return
    what = f"the optimizer, {type(optimizer).__name__}," if in_model else type(model).__name__
    LOGGER.warning("nothing is trained: %s has no parameter that requires a gradient", what)
