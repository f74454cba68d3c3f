"""A real ``torch.optim`` optimizer for one slice of a parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from foreprop.core.manifest import NO_GROUP, Hyperparameters, Manifest
from foreprop.path.tensors import DTYPES

ELEMENTWISE_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
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
"""Each updates every element from that element alone, so it gives the same bits on slices."""


class PartOptimizer:
    """The optimizer of one slice; made for its first update, with the group of that."""

    __slots__ = ("_cls", "_group", "_made", "_options", "_parameter", "_received")

    def __init__(
        self, cls: type[torch.optim.Optimizer], parameter: torch.nn.Parameter, **options: Any
    ) -> None:
        self._cls = cls
        self._parameter = parameter
        self._options = options
        self._made: torch.optim.Optimizer | None = None
        self._group: Hyperparameters | None = None
        self._received: dict[str, Any] | None = None  # a state, to be used from the next update

    def prepare(self, group: Hyperparameters) -> torch.optim.Optimizer:
        """For an update with these numbers, and with a state that has been received since."""
        if self._made is None:
            self._made = self._cls([self._parameter], **optimizer_arguments(group), **self._options)
        elif self._group is not group:
            self._made.param_groups[0].update(optimizer_arguments(group))
        self._group = group
        if self._received is not None:
            self._made.state[self._parameter] = self._received
            self._received = None
        return self._made

    @property
    def state(self) -> Mapping[str, Any]:
        """As the next update will find it."""
        if self._received is not None:
            return self._received
        return {} if self._made is None else self._made.state.get(self._parameter, {})

    def replace_state(self, state: dict[str, Any]) -> None:
        """From the next update on; an empty one is an optimizer's own at its start."""
        self._received = state or None
        if self._received is None:
            self._made = None


def optimizer_arguments(group: Hyperparameters) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in group.items():
        key, _, dtype = name.partition(" ")
        if dtype:  # the user gave a tensor, see `hyperparameters`
            arguments[key] = torch.tensor(value, dtype=DTYPES[dtype])
        else:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return arguments


def unknown_optimizer(manifest: Manifest, by_rows: Collection[str] = ()) -> str | None:
    """What to say of an optimizer that servers do not apply; ``by_rows`` are those for rows."""
    name = manifest.optimizer.name
    for info in manifest.parameters:
        allowed = by_rows if info.rows else ELEMENTWISE_OPTIMIZERS
        if info.group != NO_GROUP and name not in allowed:
            return f"optimizer {name!r} is not one that servers apply"
    return None
