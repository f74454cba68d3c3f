"""Where one parameter's averages land, beside its gradient, and how they are shown in that."""

from __future__ import annotations

import threading

import torch
from torch.autograd.graph import increment_version


class Landing:
    """Host memory of the parameter's shape, from the first average on."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter = parameter
        self._room: torch.Tensor | None = None
        self._making_room = threading.Lock()

    @property
    def room(self) -> torch.Tensor:
        """Any thread."""
        if self._room is None:
            parameter = self._parameter
            with self._making_room, torch._C.DisableTorchFunctionSubclass():
                if self._room is None:  # several servers' answers may come at once
                    self._room = torch.empty(
                        parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda
                    )
        return self._room

    def as_autograd_would(self) -> torch.Tensor:
        """What has landed, in the parameter's layout and place: kernels round by layout."""
        parameter = self._parameter
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            return self.room
        return torch.empty_like(parameter).copy_(self.room, non_blocking=True)

    def show_in(self, gradient: torch.Tensor, *, fresh: bool) -> None:
        """``fresh``: autograd has made this gradient, and nobody has looked at it since."""
        landed = self.room
        if gradient.layout != torch.strided:
            gradient.data = landed.to_sparse(gradient.sparse_dim())
        elif fresh and _may_swap(gradient):
            self._room = gradient.detach()
            gradient.data = landed
        else:
            gradient.copy_(landed, non_blocking=True)
        increment_version(gradient)


def _may_swap(gradient: torch.Tensor) -> bool:
    """Whether nobody can tell that the gradient has got other memory: no need to copy."""
    return (
        gradient.device.type == "cpu"
        and gradient.is_contiguous()
        and not gradient._is_view()
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )
