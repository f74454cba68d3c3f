"""A gradient that is multiplied before it is here: by which numbers, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from foreprop.core.norm import SquareSum

Scaling = tuple[Callable[[Any, Any], Any], Any]
"""A tensor's method, and the number or the tensor of one element to call it with."""


class Scalable(Protocol):
    """A waiting gradient, as one parameter's."""

    def squares(self) -> SquareSum | None:
        """The sum of the average's squares, if the servers tell it; blocks until they have."""

    @property
    def scalings(self) -> Sequence[Scaling]:
        """By which the average is, or is to be, multiplied, in order."""

    def scale(self, scaling: Scaling) -> None:
        """Apply it to the average, when that is here."""


class Scalings:
    """Those of one round's average."""

    def __init__(self) -> None:
        self.all: list[Scaling] = []
        self._applied = 0  # so many of them

    def clear(self) -> None:
        """Another average will come, or none is wanted."""
        self.all, self._applied = [], 0

    def apply_to(self, gradient: torch.Tensor) -> None:
        """Apply those that have not been applied."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for method, factor in self.all[self._applied :]:
                method(gradient, factor)
            self._applied = len(self.all)
