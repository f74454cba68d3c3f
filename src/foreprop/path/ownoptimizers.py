"""A user's optimizer that servers apply, see docs/extending.md."""

from __future__ import annotations

import inspect

import torch

from foreprop.config.plugins import OPTIMIZERS, maybe_installed
from foreprop.errors import ConfigError
from foreprop.path.optimizer import ELEMENTWISE_OPTIMIZERS


def register_optimizer(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Have servers apply the user's element-wise optimizer; also as a decorator.

    Raises `ConfigError` for a name that is another one's, and for a class that parameters alone do
    not make. Each process has to call it: see docs/extending.md.
    """
    given: object = cls
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer {cls!r} must be a class of torch.optim.Optimizer")
    known = ELEMENTWISE_OPTIMIZERS.get(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(f"optimizer {cls.__name__} has the name of another one that servers know")
    _, _, *others = inspect.signature(cls.__init__).parameters.values()
    needed = [each.name for each in others if each.default is each.empty and each.kind < 2]
    if needed:
        raise ConfigError(f"optimizer {cls.__name__} needs {needed[0]}: give it a default")
    ELEMENTWISE_OPTIMIZERS[cls.__name__] = cls
    return cls


def maybe_installed_optimizer(name: str) -> type[torch.optim.Optimizer] | None:
    """That of an installed package's entry point; None if there is none."""
    installed = maybe_installed(OPTIMIZERS, name)
    return None if installed is None else register_optimizer(installed)
