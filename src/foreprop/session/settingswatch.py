"""Changes of the optimizer's numbers (lr, ...), which servers must know.

They are read before a step's first push, and *announced* if they have changed. Values that are the
same objects as before cannot have changed, if they are immutable; so most steps cost next to
nothing. A change between the announcement and `step()` is an error.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch

from foreprop.errors import ConfigError, TrainingLoopError

_CONSTANT = frozenset({int, float, bool, str, type(None)})


class SettingsWatch:
    """Announces one backend's numbers. Training thread.

    ``announce`` tells the servers ``numbers()``, which count from a step on. ``parameters``: how
    many the optimizer had at `parallelize`. ``is_scaled``: the loss's scale is one of the numbers,
    which no group has.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: Callable[[], Any],
        announce: Callable[[int], None],
        *,
        parameters: int,
        is_scaled: bool,
    ) -> None:
        self.announced_step = 0
        self._optimizer = optimizer
        self._numbers = numbers
        self._send = announce
        self._parameters = parameters
        self._is_scaled = is_scaled
        self._announced: Any = None
        self._read: list[tuple[Any, ...]] | None = None
        """The groups' values when they were announced; None if they could change by themselves."""

    def announce(self, step: int) -> None:
        """Tell the servers what has changed, before the step's first push leaves."""
        if not self._is_as_read():
            numbers = self._numbers()
            if numbers != self._announced:
                self._send(step)
                self._announced = numbers
            groups = self._optimizer.param_groups
            self._read = [tuple(group.values()) for group in groups]
            for name, value in itertools.chain(*(group.items() for group in groups)):
                parts = value if type(value) is tuple else (value,)
                # else it may change, and be the same object still
                if name != "params" and not all(type(part) in _CONSTANT for part in parts):
                    self._read = None
        self.announced_step = step

    def check_unchanged(self, step: int) -> None:
        """Raise at `step()` if what was announced for it does not hold any more."""
        if self._is_as_read() or self.announced_step != step:
            return
        if self._numbers() != self._announced:
            raise TrainingLoopError(
                "the optimizer's settings (lr, ...) were changed between backward() and"
                " step(), when servers had been sent gradients with the old ones. Change them after"
                " step(), as LR schedulers do, or before backward(); or set parallelize(...,"
                " update='workers'), with which step() takes what it finds."
            )

    def _is_as_read(self) -> bool:
        # whether nobody can have set anything
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
