"""Where a worker's slices are in memory: taken from gradients, landed in parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from foreprop.config import Config
from foreprop.core.manifest import ITEMSIZE_BYTES, Manifest
from foreprop.core.slicing import Slice
from foreprop.core.window import PushWindow, may_hold_back


class ParameterMemory(Protocol):
    """Where the bytes of one parameter are; the training side owns it."""

    @property
    def values(self) -> memoryview:
        """The parameter itself, or the staging memory that stands for it."""

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Part of the gradient, to be sent now. Each part is taken once; the last one ends the
        parameter's hold on the gradient. Sending thread.
        """

    def land_average(self, gradient: torch.Tensor) -> None:
        """Collectives have aggregated it, and the workers update: flat. Any thread."""


class Casts(Protocol):
    """To and from the type in which some slices travel (`numerics.wirecasts`)."""

    def __contains__(self, slice_: int) -> bool: ...
    def size_bytes(self, slice_: int) -> int: ...
    def narrow(self, slice_: int, gradient: memoryview) -> memoryview: ...
    def destination(self, slice_: int) -> memoryview: ...
    def widen(self, slice_: int, values: memoryview) -> None: ...


class SliceMemory:
    """The slices of these parameters, as bytes; ``memory`` may be filled later."""

    def __init__(
        self, manifest: Manifest, slices: Sequence[Slice], memory: Sequence[ParameterMemory]
    ) -> None:
        self.casts: Casts | None = None
        """If some slices travel in another type."""
        itemsizes = [ITEMSIZE_BYTES[info.dtype] for info in manifest.parameters]
        self._extents = [
            (
                piece.parameter,
                piece.start_elems * itemsizes[piece.parameter],
                piece.stop_elems * itemsizes[piece.parameter],
            )
            for piece in slices
        ]
        self._memory = memory

    def take_gradient(self, slice_: int) -> memoryview:
        """As it travels, once. Sending thread."""
        parameter, start, stop = self._extents[slice_]
        gradient = self._memory[parameter].take_gradient(start, stop)
        if self.casts is not None and slice_ in self.casts:
            return self.casts.narrow(slice_, gradient)
        return gradient

    def values(self, slice_: int) -> memoryview:
        parameter, start, stop = self._extents[slice_]
        return self._memory[parameter].values[start:stop]

    def room(self, slice_: int, size_bytes: int) -> memoryview:
        """Where a reply goes: mostly into the parameter itself."""
        values = self.values(slice_)
        if self.casts is not None and slice_ in self.casts and size_bytes != len(values):
            return self.casts.destination(slice_)
        return values  # also of a slice that is cast, before its first update

    def land(self, slice_: int, size_bytes: int) -> None:
        """A reply is in its `room`: if it came cast, cast it back. Only with ``casts``."""
        casts = self.casts
        if casts is not None and slice_ in casts and size_bytes == casts.size_bytes(slice_):
            casts.widen(slice_, self.values(slice_))


def push_window(
    manifest: Manifest, slices: Sequence[Slice], config: Config, *, servers: int
) -> PushWindow | None:
    """How far a worker may run ahead of the others, if it is held back at all."""
    knobs = manifest.knobs
    if not may_hold_back(knobs.order, knobs.reply, needs_norm=knobs.aggregation.needs_norm):
        return None
    itemsizes = [ITEMSIZE_BYTES[dtype] for dtype in manifest.wire_dtypes()]
    sizes_bytes = [piece.elems * itemsizes[piece.parameter] for piece in slices]
    return PushWindow(sizes_bytes, config.push_window_bytes, servers=servers)
