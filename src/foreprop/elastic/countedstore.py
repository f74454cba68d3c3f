"""A server's tensors where not all workers' gradients count, and some may come late.

With backup workers others go on while a late one is still being answered. So answers never carry
memory that an update may be writing to: after each update the values are copied, one pass over the
slice's bytes, and an answer carries the copy of the step that it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.slicing import Slice
from foreprop.errors import InternalError, TrainingLoopError
from foreprop.path.lockedstore import LockedStore
from foreprop.path.memory import bytes_of
from foreprop.path.slicestore import SliceTensors
from foreprop.path.sums import GradientBuffer, add_up


class Version(NamedTuple):
    """A slice's values after a step."""

    step: int
    data: memoryview
    values: torch.Tensor | None = None
    """The copy that ``data`` are the bytes of, if there is one."""


class CountedStore(LockedStore):
    """Averages over the ranks that `about` has named. Locking as in `SliceStore`."""

    def __init__(self, manifest: Manifest, slices: Sequence[Slice], index: int) -> None:
        self._copies = manifest.knobs.backup_workers > 0
        super().__init__(manifest, slices, index, locks=self._copies)
        self._is_mean = [way == "mean" for way in manifest.reductions()]
        self._at_step = self._counted = 0  # of the update under way
        self._ranks: Sequence[int] = ()
        self._versions: dict[int, Version] = {}
        self._read: dict[int, torch.Tensor] = {}
        """By slice: what rank 0 was sent last, by which its edits are found."""

    # Values.
    def version(self, slice_: int) -> Version:
        """The values of now."""
        if self._copies:
            return self._versions[slice_]
        return Version(0, self._slices[slice_].view)

    def note_read(self, slice_: int, version: Version) -> None:
        """Rank 0 is sent this."""
        if version.values is not None:
            self._read[slice_] = version.values

    def install_value(self, slice_: int) -> None:
        super().install_value(slice_)
        if self._copies and slice_ not in self._versions:
            self._read[slice_] = self._copy(slice_, 0)

    def put_value(self, slice_: int, buffer: GradientBuffer, *, step: int = 0) -> None:
        """Later values come if somebody has used ``.data``.

        With backup workers nothing may have changed: raises `TrainingLoopError`.
        """
        if not step or not self._copies:
            super().put_value(slice_, buffer, step=step)
            return
        if not self._is_unchanged(slice_, buffer, self._read[slice_]):
            name = self._name_of(slice_)
            raise TrainingLoopError(
                f"{name} was changed by hand by rank 0 (step {step}), but with backup_workers"
                " other ranks may be in another step: change parameters before parallelize()"
            )

    def _copy(self, slice_: int, step: int) -> torch.Tensor:
        tensors = self._slices[slice_]
        source = tensors.parameter if tensors.shown is None else tensors.shown
        values = tensors.extent.part(source).detach().clone()
        self._versions[slice_] = Version(step, bytes_of(values), values)
        return values

    # Updates.
    def about(self, step: int, counted: int) -> None:
        """The next `update` is for this step, and its mean over so many ranks."""
        self._at_step, self._counted = step, counted

    def drop(self, slice_: int, rank: int) -> None:
        """What the rank has pushed does not count."""
        buffer = self._slices[slice_].gradients.pop(rank, None)
        if buffer is not None:
            buffer.pool.append(buffer)

    def update(
        self,
        slice_: int,
        ranks: Sequence[int],
        groups: Sequence[Hyperparameters],
        coefficient: float = 1.0,
    ) -> None:
        self._ranks = ranks
        with self._writing:
            super().update(slice_, ranks, groups, coefficient)
            if self._copies:
                self._copy(slice_, self._at_step)

    def _total(
        self, tensors: SliceTensors, ranks: Sequence[int], scale: float = 1.0
    ) -> torch.Tensor:
        if scale != 1.0:
            raise InternalError("a scaled loss, where not all gradients count")
        if self._same_batch is not None:
            self._compare(self._same_batch, tensors, ranks)
        total = add_up([tensors.gradients[rank].tensor for rank in ranks], tensors.sum_dtype)
        if self._is_mean[tensors.piece.parameter] and self._counted > 1:
            total /= self._counted
        return total

    def _keep(self, tensors: SliceTensors, total: torch.Tensor) -> GradientBuffer:
        """As usual, but others' gradients may be here, to be dropped, or may just come."""
        buffers = [tensors.gradients.pop(rank) for rank in self._ranks]
        kept = next((buffer for buffer in buffers if buffer.tensor is total), None)
        if kept is None:
            kept = buffers[0]
            kept.tensor.copy_(total)  # added up in more than the wire's type
        if tensors.kept is not None:
            tensors.kept.pool.append(tensors.kept)
        for buffer in buffers:
            if buffer is not kept:
                buffer.pool.append(buffer)
        tensors.kept, tensors.total = kept, None
        return kept

    def _drop_gradients(self, tensors: SliceTensors) -> None:
        tensors.total = None

    # Checkpoints.
    def export_gradient(self, slice_: int) -> bytes:
        if not self._copies:
            return super().export_gradient(slice_)
        name = self._name_of(slice_)
        raise TrainingLoopError(
            f"the gradient of {name} was read after step(): with backup_workers other ranks may"
            " have made another step; read each rank's own in hooks (Tensor.register_hook)"
        )
