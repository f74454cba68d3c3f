"""The user's optimizer, as servers need to know it, and those that they can apply."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from foreprop.core.manifest import ITEMSIZE_BYTES, NO_GROUP, SCALE, Hyperparameters
from foreprop.engine.memory import dtype_name
from foreprop.errors import ConfigError

_IMPLEMENTATION_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of how, not what: servers use the plain loop, the same bits for any slice."""

_REASONS = {
    "LBFGS": "it needs the whole gradient and evaluates the model several times in one step",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it keeps row and column statistics of whole matrices",
    "SparseAdam": "it needs sparse gradients: parameters of embeddings with sparse=True",
}


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse, with the reason, an optimizer that servers cannot apply slice by slice."""
    reason = why_not_elementwise(optimizer)
    if reason is not None:
        allowed = ", ".join(sorted(ELEMENTWISE_OPTIMIZERS))
        raise ConfigError(
            f"optimizer is {type(optimizer).__name__}, which is not element-wise as far as servers"
            f" know: {reason}. Servers update each slice by itself. Say update='workers', or use"
            f" one of {allowed}."
        )
    check_groups(optimizer)


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Why servers cannot apply an optimizer slice by slice; None if they can."""
    cls = type(optimizer)
    if maybe_served(cls.__name__) is cls:
        return None
    own = (
        "it is not one of torch.optim's, nor registered (foreprop.register_optimizer), and servers"
        " build the optimizer from its name"
    )
    return _REASONS.get(cls.__name__, own) if cls.__module__.startswith("torch.") else own


def can_be_served(optimizer: torch.optim.Optimizer) -> bool:
    """Whether servers can apply an optimizer to dense parameters."""
    try:
        check_elementwise(optimizer)
        hyperparameters(optimizer)
    except ConfigError:
        return False
    return True


def check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Refuse settings that no architecture can apply."""
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(f"parameter group {number} has differentiable=True; set it to False")
        for name, value in group.items():
            if isinstance(value, float):
                _finite(value, name)


def hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[Hyperparameters, ...]:
    """The numbers of every parameter group, as they are now.

    A number in a tensor (``lr=torch.tensor(0.1)``) goes by its name and its type, "lr float32":
    torch computes in that type then, and so must the servers.
    """
    cls, found = type(optimizer), []
    if (names := _names_of.get(cls)) is None:
        accepted = list(inspect.signature(cls.__init__).parameters)[2:]  # after self and params
        names = tuple(name for name in accepted if name not in _IMPLEMENTATION_CHOICES)
        _names_of[cls] = names
    for group in optimizer.param_groups:
        own: Hyperparameters = {}
        for name in names:
            if name in group:
                value, label = group[name], name
                if isinstance(value, torch.Tensor):
                    dtype = dtype_name(value.dtype)
                    if dtype not in ITEMSIZE_BYTES:
                        raise ConfigError(
                            f"{name} of a parameter group is a tensor of {dtype}; it must be a"
                            f" plain number or one of {sorted(ITEMSIZE_BYTES)}"
                        )
                    label = f"{name} {dtype}"
                own[label] = _plain(value, name)
        found.append(own)
    return tuple(found)


_names_of: dict[type, tuple[str, ...]] = {}


def _plain(value: Any, name: str) -> bool | int | float | list[float] | None:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (tuple, list)):
        return [_finite(item, name) for item in value]
    if isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return _finite(value, name)
    raise ConfigError(f"{name} of a parameter group is {value!r}; it must be a number")


def _finite(value: Any, name: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ConfigError(f"{name} of a parameter group is {number}; it must be finite")
    return number


def named_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.nn.Parameter, int]]:
    """The optimizer's parameters in the model's order: (name, parameter, group).

    Those that the model does not have come last, under the name of their group. `others_named` has
    the parameters whose gradients are averaged, too.
    """
    group_of: dict[int, tuple[int, int, torch.nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            group_of[id(parameter)] = (number, position, parameter)
    for name, parameter in model.named_parameters():
        found = group_of.pop(id(parameter), None)
        if found is not None:
            yield name, parameter, found[0]
    for number, position, parameter in group_of.values():
        yield f"group{number}.{position}", parameter, number


def others_named(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.nn.Parameter, int]]:
    """The model's parameters that require a gradient, and that the optimizer does not have."""
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in ours and not parameter.is_meta:
            yield name, parameter, NO_GROUP


def checked_dtype(name: str, parameter: torch.nn.Parameter) -> str:
    """Raises `ConfigError` for a parameter that cannot be sent."""
    dtype = dtype_name(parameter.dtype)
    if dtype not in ITEMSIZE_BYTES:
        raise ConfigError(
            f"parameter {name} is {dtype}; parameters must be one of {sorted(ITEMSIZE_BYTES)}"
        )
    if torch.nn.parameter.is_lazy(parameter):
        raise ConfigError(
            f"parameter {name} is not initialised yet (a lazy module): run one forward pass"
            " before parallelize()"
        )
    return dtype


ELEMENTWISE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls
    for cls in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    )
}
"""Those that update an element from that element alone, so slices give the same bits."""


def maybe_served(name: str) -> type[torch.optim.Optimizer] | None:
    """The class of this name that servers apply; a user's or an installed package's, too."""
    known = ELEMENTWISE_OPTIMIZERS.get(name)
    if known is None and not hasattr(torch.optim, name):
        from foreprop.config.plugins import OPTIMIZERS, maybe_installed

        if (installed := maybe_installed(OPTIMIZERS, name)) is not None:
            return register_optimizer(installed)
    return known


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


def with_scale(
    groups: Sequence[Hyperparameters], scale: float | None
) -> tuple[Hyperparameters, ...]:
    return tuple(groups) if scale is None else (*groups, {SCALE: scale})


def scale_of(groups: Sequence[Mapping[str, Any]]) -> float:
    return float(groups[-1].get(SCALE, 1.0)) if groups else 1.0
