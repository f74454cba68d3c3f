"""The gradient object that autograd was last seen to add to, for as long as it is ``p.grad``."""

from __future__ import annotations

import weakref

import torch

from foreprop.path.waiting import Pending, forget, is_waiting, make_wait, stop_waiting


class SeenGradient:
    """Known without being kept alive; while it waits, ``reader`` is asked before each use."""

    def __init__(self, reader: Pending) -> None:
        self._reader = reader
        self._reference: weakref.ref[torch.Tensor] | None = None
        self._id = 0
        self.version = 0
        """The tensor's, when it was last seen."""

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._reference() if self._reference is not None else None

    def see(self, gradient: torch.Tensor) -> bool:
        """Now it is this one; whether it is another than before."""
        new = self.tensor is not gradient
        if new:
            self.forget()
            self._reference, self._id = weakref.ref(gradient), id(gradient)
        self.version = gradient._version
        return new

    def is_continued_by(self, gradient: torch.Tensor) -> bool:
        """Whether autograd has added to the same tensor, and nobody else has written to it."""
        return self.tensor is gradient and gradient._version == self.version + 1

    def wait(self) -> None:
        """Whoever uses it from now on asks first."""
        gradient = self.tensor
        if gradient is not None and not is_waiting(gradient):
            make_wait(gradient, self._reader)

    def release(self) -> None:
        """It is an ordinary tensor again."""
        gradient = self.tensor
        if gradient is not None:
            stop_waiting(gradient)

    def forget(self) -> None:
        """It is not ``p.grad`` any more, and may be gone."""
        if self._reference is not None:
            forget(self._id, self._reader)
            self._reference = None
