"""A server's tensors that others read while they change: where ranks are in different steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch

from foreprop.core.manifest import Manifest
from foreprop.core.slicing import Slice
from foreprop.path.slicestore import SliceStore
from foreprop.path.sums import GradientBuffer


class LockedStore(SliceStore):
    """Checkpoints wait for the update that is under way; ``locks``: whether one may be."""

    def __init__(
        self, manifest: Manifest, slices: Sequence[Slice], index: int, *, locks: bool
    ) -> None:
        super().__init__(manifest, slices, index)
        self._writing = threading.Lock() if locks else contextlib.nullcontext()
        """Held while values or optimizer state change."""

    def _is_unchanged(self, slice_: int, buffer: GradientBuffer, read: torch.Tensor) -> bool:
        """Whether a rank's values are those that it has read, to the bit. The buffer goes back."""
        tensors = self._slices[slice_]
        pushed, read = tensors.extent.part(buffer.tensor), read.to(tensors.parameter.dtype)
        same = torch.equal(pushed.view(torch.uint8), read.view(torch.uint8))
        buffer.pool.append(buffer)
        return same

    def _name_of(self, slice_: int) -> str:
        return self._names[self._slices[slice_].piece.parameter]

    # Checkpoints.
    def export_state(self, slice_: int) -> bytes:
        with self._writing:
            return super().export_state(slice_)

    def import_state(self, slice_: int, data: memoryview) -> None:
        with self._writing:
            super().import_state(slice_, data)

    def export_master(self, slice_: int) -> bytes:
        with self._writing:
            return super().export_master(slice_)

    def export_average(self, slice_: int) -> bytes:
        with self._writing:
            return super().export_average(slice_)
