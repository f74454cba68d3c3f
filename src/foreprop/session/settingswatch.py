"""The optimizer's settings (lr, ...): announced before a step's first push, unchanged until step().

They are read from the parameter groups twice in a step. Mostly nobody has set any of them since,
which is seen by the objects' identities, without reading one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.session.backends import Backends

_CONSTANT = frozenset({int, float, bool, str, type(None)})


class SettingsWatch:
    """One backend's. Training thread."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backends: Backends,
        *,
        parameters: int,
        is_scaled: bool,
    ) -> None:
        """``parameters``: that the optimizer had at `parallelize`.

        ``is_scaled``: the loss's scale is one of the numbers, which no group has.
        """
        self.announced_step = 0
        self._optimizer = optimizer
        self._backends = backends
        self._parameters = parameters
        self._is_scaled = is_scaled
        self._announced: Any = None
        self._read: list[tuple[Any, ...]] | None = None
        """The groups' values when they were announced; None if they could change by themselves."""

    def announce(self, step: int) -> None:
        """The step's first push is about to leave: servers must know what has changed."""
        if not self._is_as_read():
            numbers = self._backends.numbers()
            if numbers != self._announced:
                self._backends.announce(step)
                self._announced = numbers
            self._keep()
        self.announced_step = step

    def check_unchanged(self, step: int) -> None:
        """At `step()`: what was announced still holds, if anything was."""
        if self._is_as_read() or self.announced_step != step:
            return
        if self._backends.numbers() != self._announced:
            raise TrainingLoopError(
                "the optimizer's settings (lr, ...) were changed between backward() and"
                " step(), when servers had been sent gradients with the old ones. Change them after"
                " step(), as LR schedulers do, or before backward(); or set parallelize(...,"
                " update='workers'), with which step() takes what it finds."
            )

    def _keep(self) -> None:
        groups = self._optimizer.param_groups
        self._read = [tuple(group.values()) for group in groups]
        for group in groups:
            if not all(name == "params" or _is_constant(value) for name, value in group.items()):
                self._read = None
                return

    def _is_as_read(self) -> bool:
        """Whether nobody can have set anything. Raises `ConfigError` for other parameters."""
        groups, read = self._optimizer.param_groups, self._read
        count = 0
        for group in groups:
            count += len(group["params"])
        if count != self._parameters:
            raise ConfigError(
                f"the optimizer had {self._parameters} parameters at parallelize() and has"
                f" {count} now; call add_param_group() before parallelize()"
            )
        if read is None or self._is_scaled or len(groups) != len(read):
            return False
        for group, values in zip(groups, read, strict=True):
            if len(group) != len(values) or not all(map(operator.is_, group.values(), values)):
                return False
        return True


def _is_constant(value: Any) -> bool:
    """Whether it is the same as long as it is the same object."""
    if type(value) is tuple:
        return all(type(part) in _CONSTANT for part in value)
    return type(value) in _CONSTANT
