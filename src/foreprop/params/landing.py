"""Where a parameter's averages land, and how they are shown in its gradient."""

from __future__ import annotations

import threading

import torch
from torch.autograd.graph import increment_version

from foreprop.engine.memory import Memory, drop_pages


class Landing:
    """Host memory of the parameter's shape, where its averages land. Any thread may ask for it."""

    def __init__(self, parameter: torch.nn.Parameter, memory: Memory, *, stays: bool) -> None:
        self._parameter = parameter
        self._device = memory.accelerator  # that gradients are copied from beside training
        self._stays = stays  # until the next average lands: others may need it
        self._buffer: torch.Tensor | None = None
        self._is_lent = False  # the buffer is a part of what a whole pack lands in
        self._allocating = threading.Lock()

    @property
    def buffer(self) -> torch.Tensor:
        if self._buffer is None:
            parameter = self._parameter
            with self._allocating, torch._C.DisableTorchFunctionSubclass():
                if self._buffer is None:  # several servers' answers may come at once
                    make = torch.empty if self._device is None else self._device.host_memory
                    self._buffer = make(parameter.shape, dtype=parameter.dtype)
        return self._buffer

    def empty(self) -> None:
        """Give the buffer's memory back, until the next average lands."""
        stays = self._stays or self._is_lent or self._device is not None
        if self._buffer is not None and not stays:
            drop_pages(self._buffer)

    def lend(self, buffer: torch.Tensor) -> None:
        self._buffer, self._is_lent = buffer, True

    def _copy_to(self, target: torch.Tensor) -> torch.Tensor:
        late = self._device is not None and self._device.is_pinned(self.buffer)
        return target.copy_(self.buffer, non_blocking=late)

    def as_autograd_would(self) -> torch.Tensor:
        parameter = self._parameter  # in whose layout and place it must be: kernels round by layout
        is_alike = self._is_lent or parameter.device.type == "cpu"
        if parameter.is_contiguous() and is_alike and not self._stays:
            return self.buffer
        return self._copy_to(torch.empty_like(parameter))

    def show_in(self, gradient: torch.Tensor, *, unseen: bool) -> None:
        landed = self.buffer
        if gradient.layout != torch.strided:
            gradient.data = landed.to_sparse(gradient.sparse_dim()).to(gradient.device)
        elif unseen and not (self._is_lent or self._stays) and _may_swap(gradient):
            self._buffer, gradient.data = gradient.detach(), landed
        else:
            self._copy_to(gradient)
        increment_version(gradient)


def _may_swap(gradient: torch.Tensor) -> bool:
    # then nobody can tell that the gradient has other memory now, and nothing need be copied
    return (
        gradient.device.type == "cpu"
        and gradient.is_contiguous()
        and not gradient._is_view()
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )
