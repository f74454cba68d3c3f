"""A server's tensors where each worker's push is an update by itself.

Answers never carry memory that an update may be writing to: after each update the values are copied
(a *snapshot*), and an answer carries the latest one when it leaves. The snapshot that a worker was
sent last is what it has read, which delay compensation needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.slicing import Slice
from foreprop.core.staleness import compensate
from foreprop.errors import InternalError, TrainingLoopError
from foreprop.path.lockedstore import LockedStore
from foreprop.path.memory import bytes_of
from foreprop.path.slicestore import SliceTensors
from foreprop.path.sums import GradientBuffer


class StaleStore(LockedStore):
    """Updates by one rank's gradient at a time, as its share of the mean or sum."""

    def __init__(self, manifest: Manifest, slices: Sequence[Slice], index: int) -> None:
        super().__init__(manifest, slices, index, locks=True)
        self._strength = manifest.knobs.delay_compensation
        self._snapshots: dict[int, torch.Tensor] = {}
        """By slice, with its padding; never written to."""
        self._reads: dict[tuple[int, int], torch.Tensor] = {}
        """By rank and slice: the snapshot that the rank was sent last.

        Of rank 0, whose edits are found by it; with delay compensation of all.
        """
        self._applying: GradientBuffer | None = None

    def send_to(self, rank: int, slice_: int) -> memoryview:
        """The slice's values as bytes, which this rank is about to be sent. Sending thread."""
        snapshot = self._snapshots[slice_]
        if self._strength or not rank:
            self._reads[rank, slice_] = snapshot
        return bytes_of(self._slices[slice_].extent.part(snapshot))

    # Values from rank 0.
    def install_value(self, slice_: int) -> None:
        """At the start: all ranks begin from these, rank 0 too."""
        super().install_value(slice_)
        tensors = self._slices[slice_]
        self._snapshots[slice_] = self._reads[0, slice_] = tensors.parameter.detach().clone()

    def put_value(self, slice_: int, buffer: GradientBuffer, *, step: int = 0) -> None:
        """Later ones come with a push if somebody has used ``.data``: nothing may have changed.

        Raises `TrainingLoopError` if they are not what rank 0 has read.
        """
        if not step:
            super().put_value(slice_, buffer)
            return
        read = self._slices[slice_].extent.part(self._reads[0, slice_])
        if not self._is_unchanged(slice_, buffer, read):
            name = self._name_of(slice_)
            raise TrainingLoopError(
                f"{name} was changed by hand by rank 0 (step {step}), but with staleness the ranks"
                " are in different steps: change parameters before parallelize(), or close the"
                " session first and begin another"
            )

    # Updates.
    def update(
        self,
        slice_: int,
        ranks: Sequence[int],
        groups: Sequence[Hyperparameters],
        coefficient: float = 1.0,
    ) -> None:
        """By the gradient of one rank, or of none."""
        if not ranks:
            return
        tensors = self._slices[slice_]
        with self._writing:
            self._apply(tensors, ranks, groups, coefficient)
        self._snapshots[slice_] = tensors.parameter.detach().to(tensors.wire_dtype, copy=True)

    def _total(
        self, tensors: SliceTensors, ranks: Sequence[int], scale: float = 1.0
    ) -> torch.Tensor:
        """The rank's share, compensated; other ranks' gradients of the slice may be queued."""
        (rank,) = ranks
        self._applying = tensors.gradients.pop(rank)
        total = self._applying.tensor.to(tensors.sum_dtype)
        if self._strength:
            now = tensors.parameter.detach().to(tensors.sum_dtype)
            then = self._reads[rank, tensors.piece.number].to(tensors.sum_dtype)
            total = compensate(total, now, then, strength=self._strength)
        divisor = self._divisors[tensors.piece.parameter]
        return total / divisor if divisor > 1 else total

    def _keep(self, tensors: SliceTensors, total: torch.Tensor) -> GradientBuffer:
        """No gradient is read by anybody after its update."""
        applied, self._applying = self._applying, None
        if applied is None:
            raise InternalError(f"an update of slice {tensors.piece.number} without a gradient")
        applied.pool.append(applied)
        return applied

    # Checkpoints.
    def export_gradient(self, slice_: int) -> bytes:
        name = self._name_of(slice_)
        raise TrainingLoopError(
            f"the gradient of {name} was read after step(), which is the ranks' average: with"
            " staleness there is none; read each rank's own in hooks (Tensor.register_hook), or"
            " leave staleness out"
        )
