"""What `parallelize` says of an argument of the wrong kind."""

from __future__ import annotations

import torch

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
