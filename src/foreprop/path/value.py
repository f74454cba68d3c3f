"""A parameter's value: where its bytes are, and whether somebody has changed it by hand."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from foreprop.core.wire import Flag
from foreprop.errors import ConfigError
from foreprop.path.managedparameter import SessionState

GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""Whoever has used it can change the value, and leave no trace."""


class ValueMark:
    """By which it is known whether somebody has changed a parameter's value by hand."""

    __slots__ = ("address", "exposed", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.address = parameter.data_ptr()
            self.version = parameter._version
        self.exposed = False
        """Somebody holds `.data`, through which edits leave no trace."""


class ParameterValue:
    """Of a parameter that servers update. Training thread."""

    def __init__(self, index: int, parameter: torch.nn.Parameter, session: SessionState) -> None:
        self.memory = session.memory_of(parameter)
        self.mark = ValueMark(parameter)
        self._index = index
        self._parameter = parameter
        self._session = session

    def land(self) -> None:
        """New values are in the memory: make the parameter show them."""
        self.memory.land()
        self.mark.version = self._parameter._version

    def begin_update(self) -> tuple[int, bool]:
        """A gradient leaves, and a new value will come.

        Returns flags, and whether rank 0 must send the values, which were changed by hand.
        """
        parameter, mark = self._parameter, self.mark
        changed = parameter._version != mark.version
        if parameter.data_ptr() != mark.address:
            self._rebind()
            changed = True
        sends = (changed or mark.exposed) and self._session.world.rank == 0
        mark.exposed = False
        if sends:
            self.memory.before_sending_values()
        increment_version(parameter)  # whoever saved the old value must not use it
        mark.version = parameter._version
        return (Flag.VALUE_CHANGED if changed else 0), sends

    def _rebind(self) -> None:
        check_same_kind(self._index, self._parameter, self._session)
        self.memory = self._session.memory_of(self._parameter)
        self.mark.address = self._parameter.data_ptr()


def check_same_kind(
    index: int, tensor: torch.Tensor, session: SessionState, now: str = " and is"
) -> None:
    """Raise `ConfigError` unless the tensor is what the parameter was at `parallelize`."""
    info = session.infos[index]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != info.shape or dtype != info.dtype:
        raise ConfigError(
            f"{info.name} was {info.dtype} {info.shape} at parallelize(){now} {dtype}"
            f" {tuple(tensor.shape)} now; change the model before parallelize()"
        )
