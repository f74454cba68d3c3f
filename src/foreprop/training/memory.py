"""Where a parameter's bytes are: its own memory, or host memory that stands for it.

This is the one place that knows about devices. A contiguous CPU parameter is sent from and
received into directly; anything else (another layout, a GPU) is staged through contiguous host
memory, pinned for a GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch

from foreprop.engine.slicestore import bytes_of


class Memory(Protocol):
    """The bytes of one parameter, and of its gradient on the way out. See `direct`/`staged`."""

    values: memoryview

    def take_gradient(self, gradient: torch.Tensor) -> memoryview:
        """The gradient's bytes, in the order of the parameter's flattened elements."""

    def before_sending_values(self) -> None:
        """Make ``values`` show the parameter as it is now."""

    def land(self) -> None:
        """All replies are in ``values``: make the parameter show them. Training thread."""


class DirectMemory:
    """A contiguous CPU parameter: no copies at all."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.values = bytes_of(parameter)

    def take_gradient(self, gradient: torch.Tensor) -> memoryview:
        return bytes_of(gradient.contiguous())

    def before_sending_values(self) -> None:
        pass

    def land(self) -> None:
        pass


class StagedMemory:
    """Any other parameter: through contiguous host memory.

    The copy to the host ends before `take_gradient` returns, so a gradient enters the queue only
    when it is complete.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        pinned = parameter.device.type == "cuda"
        shape, dtype = parameter.shape, parameter.dtype
        self._values = torch.empty(shape, dtype=dtype, pin_memory=pinned)
        self._gradient = torch.empty(shape, dtype=dtype, pin_memory=pinned)
        self.values = bytes_of(self._values)
        self._gradient_bytes = bytes_of(self._gradient)

    def take_gradient(self, gradient: torch.Tensor) -> memoryview:
        self._gradient.copy_(gradient)
        return self._gradient_bytes

    def before_sending_values(self) -> None:
        self._values.copy_(self._parameter.detach())

    def land(self) -> None:
        with torch.no_grad():
            self._parameter.copy_(self._values)


def memory_of(parameter: torch.Tensor) -> Memory:
    if parameter.device.type == "cpu" and parameter.is_contiguous():
        return DirectMemory(parameter)
    return StagedMemory(parameter)
