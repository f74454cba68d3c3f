"""Nothing is averaged twice: which parameters the open sessions of this process have.

Other libraries' wrappers around the model or the optimizer would average them, too. They are
recognised here, and `hooks.wrappers`, loaded where there is one, takes them off.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from foreprop.errors import ConfigError
from foreprop.hooks.interception import Interception


class Owner(Protocol):
    """A session."""

    def give_away(self, parameter: torch.Tensor) -> bool:
        """Another session's optimizer has it; False if this one's has it too."""


_managed: dict[int, tuple[str, weakref.ref[Owner]]] = {}
"""By the parameter's id: its name in the session, and the session."""


def is_managed(parameter: torch.Tensor) -> bool:
    """Whether an open session has the parameter."""
    return id(parameter) in _managed


def managed_ids() -> Set[int]:
    return _managed.keys()


def claim(name: str, parameter: torch.Tensor, owner: Owner) -> None:
    _managed[id(parameter)] = (name, weakref.ref(owner))


def release(parameter: torch.Tensor, owner: Owner) -> None:
    """Nobody has it any more, unless it is another session's by now."""
    _, reference = _managed.get(id(parameter), ("", None))
    if reference is not None and reference() is owner:
        del _managed[id(parameter)]


def check_unmanaged(named: Sequence[tuple[str, torch.nn.Parameter, int]]) -> None:
    """Take over what another session only reads; refuse what it updates."""
    for name, parameter, _ in named:
        if id(parameter) not in _managed:
            continue
        theirs, reference = _managed[id(parameter)]
        session = reference()
        if session is None or not session.give_away(parameter):
            raise ConfigError(
                f"parameter {name} belongs to another open session, as {theirs}:"
                " give each parameter to one optimizer, and close() a session before another one"
                " takes its parameters"
            )


# Wrappers.
EXCHANGING = ("deepspeed", "horovod", "fairscale", "apex")
"""Libraries whose modules and optimizers exchange gradients themselves."""
_WRAPPING = ("torch.nn.parallel", "torch.distributed", *EXCHANGING)


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """What is to be trained in ``model``; `ConfigError` for a wrapper that cannot be taken off."""
    if not any(_may_wrap(module) for module in model.modules()):
        return model
    from foreprop.hooks.wrappers import unwrap_model

    return unwrap_model(model)


def _may_wrap(module: torch.nn.Module) -> bool:
    kinds = [*type(module).__mro__, *(type(p.data) for p in module.parameters(recurse=False))]
    return any(kind.__module__.startswith(_WRAPPING) for kind in kinds)


def bare_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer in accelerate's; `ConfigError` if it is one that communicates itself."""
    if not type(optimizer).__module__.startswith(("accelerate", *EXCHANGING)):
        return optimizer
    from foreprop.hooks.wrappers import unwrap_optimizer

    return unwrap_optimizer(optimizer)


def watch_wrappers() -> list[Callable[[], None]]:
    """From now on wrappers around synchronised models only pass on; the functions end that."""
    return [interception.hold() for interception in _INTERCEPTIONS]


def _led_past(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method of DistributedDataParallel: `hooks.wrappers` has what is done instead."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: DistributedDataParallel, *arguments: Any, **options: Any) -> Any:
            from foreprop.hooks.wrappers import INSTEAD

            return INSTEAD[name](original, self, *arguments, **options)

        return method

    return wrap


_INTERCEPTIONS = [
    Interception(DistributedDataParallel, name, _led_past(name))
    for name in ("__init__", "forward", "join", "register_comm_hook")
]
