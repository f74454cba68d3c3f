"""Copies of slices' values, where others read them while they change.

Where ranks may be in different steps, answers never carry memory that an update may be writing to.
After each update the values are copied, one pass over the slice's bytes, and answers carry the copy
(a *version*). What a rank was sent last is what it has read: by that edits by hand are found, and
gradients compensated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from foreprop.core.manifest import Manifest
from foreprop.core.staleness import compensate
from foreprop.errors import TrainingLoopError
from foreprop.path.memory import bytes_of

if TYPE_CHECKING:
    from foreprop.path.slicestore import SliceTensors


class Version(NamedTuple):
    """A slice's values after a step."""

    step: int
    values: torch.Tensor
    """With their padding; never written to."""
    data: memoryview
    """The slice's own bytes of that."""


class Versions:
    """Those of one server's slices. Locking as in `SliceStore`; answers are read by any thread."""

    def __init__(self, manifest: Manifest) -> None:
        self._strength = manifest.knobs.delay_compensation
        self._setting = "staleness" if manifest.knobs.staleness else "backup_workers"
        self._newest: dict[int, Version] = {}
        self._read: dict[tuple[int, int], torch.Tensor] = {}
        """By rank and slice, what the rank was sent last.

        Of rank 0, whose edits are found by it; with delay compensation of all.
        """

    def add(self, tensors: SliceTensors, step: int, *, changed: bool) -> None:
        """After an update; or at the start: all ranks begin from these, rank 0 too."""
        number, newest = tensors.piece.number, self._newest.get(tensors.piece.number)
        if newest is not None and not changed:
            self._newest[number] = newest._replace(step=step)
            return
        values = (tensors.parameter if tensors.shown is None else tensors.shown).detach().clone()
        self._newest[number] = Version(step, values, bytes_of(tensors.extent.part(values)))
        if newest is None:
            self._read[0, number] = values

    def read(self, slice_: int, ranks: Sequence[int]) -> Version:
        """What these ranks are sent now."""
        newest = self._newest[slice_]
        for rank in ranks:
            if self._strength or not rank:
                self._read[rank, slice_] = newest.values
        return newest

    def check_unedited(
        self, tensors: SliceTensors, pushed: torch.Tensor, name: str, step: int
    ) -> None:
        """Rank 0 sends later values if somebody has used ``.data``: nothing may have changed.

        Raises `TrainingLoopError` if they are not what it has read, to the bit.
        """
        part = tensors.extent.part
        read = part(self._read[0, tensors.piece.number]).to(tensors.parameter.dtype)
        if not torch.equal(part(pushed).view(torch.uint8), read.view(torch.uint8)):
            raise TrainingLoopError(
                f"{name} was changed by hand by rank 0 (step {step}), but with {self._setting}"
                " other ranks may be in another step: change parameters before parallelize(), or"
                " close the session first and begin another"
            )

    def compensated(
        self, tensors: SliceTensors, ranks: Sequence[int], total: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of one rank, as it would be about the values of now."""
        if not self._strength:
            return total
        now = tensors.parameter.detach().to(total.dtype)
        then = self._read[ranks[0], tensors.piece.number].to(total.dtype)
        return compensate(total, now, then, strength=self._strength)

    def refuse_gradient(self, name: str) -> TrainingLoopError:
        """Why nobody can read the gradient of an update."""
        return TrainingLoopError(
            f"the gradient of {name} was read after step(), which is the ranks' average: with"
            f" {self._setting} there is none; read each rank's own in hooks"
            f" (Tensor.register_hook), or leave {self._setting} out"
        )
