"""The image: the values of a slice that all workers have, as servers know it; and special updates.

With an exact codec it is what the server has. With another one the server's values, the *masters*,
are ahead of it by what did not cross yet.

Of ``dgc`` the update has no momentum, which workers have. Of ``sign`` it is of the majority's signs
(Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from foreprop.compression.choosing import coded_slices
from foreprop.core.codec import codec_of, kind_of
from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.slicing import Slice
from foreprop.path.slicestore import SliceStore, SliceTensors
from foreprop.path.tensors import IMAGE, MASTER, encode_state


class ImageStore(SliceStore):
    """Has images of the slices with a lossy codec; as with casts, they are what is shown."""

    def __init__(self, manifest: Manifest, slices: Sequence[Slice], index: int) -> None:
        super().__init__(manifest, slices, index)
        own = [piece for piece in slices if piece.server == index]
        choices = manifest.knobs.compression
        kinds = [kind_of(codec_of(info.name, choices)) for info in manifest.parameters]
        self._votes = {piece.number for piece in own if kinds[piece.parameter] == "sign"}
        """With those that are too small for a code."""
        dgc = [piece for piece in own if kinds[piece.parameter] == "dgc"]
        self._accumulated = coded_slices(manifest, dgc)
        """Their pushes have the momentum."""
        self._settled = manifest.optimizer.groups
        self._announced: Sequence[Hyperparameters] = ()
        self._plain: dict[int, Hyperparameters] = {}
        """By group, ``_announced`` without momentum."""

    def image_of(self, slice_: int) -> torch.Tensor:
        """The slice's, to be moved in place; from now on `install_value` compares with it."""
        tensors = self._slices[slice_]
        if tensors.shown is None:
            tensors.shown = tensors.extent.zeros(tensors.parameter.dtype)
        return tensors.extent.part(tensors.shown)

    def update(
        self,
        slice_: int,
        ranks: Sequence[int],
        groups: Sequence[Hyperparameters],
        coefficient: float = 1.0,
    ) -> None:
        """As every store's; see the top. Raises `TrainingLoopError` if DGC's momentum changed."""
        coded = self._accumulated.get(slice_)
        if coded is not None and ranks:
            groups = self._without_momentum(coded.piece.parameter, groups)
        super().update(slice_, ranks, groups, coefficient)

    def aggregate(self, slice_: int, ranks: Sequence[int], scale: float = 1.0) -> SquareSum:
        """As every store's. The global norm is without what workers have clipped themselves."""
        squares = super().aggregate(slice_, ranks, scale)
        is_clipped = slice_ in self._accumulated and self._aggregation.clip_grad_norm is not None
        # what is not finite has come as it is, and a scaler must see it
        return ZERO if is_clipped and not squares.beyond else squares

    def _clip(self, tensors: SliceTensors, total: torch.Tensor, coefficient: float) -> None:
        if tensors.piece.number not in self._accumulated:
            super()._clip(tensors, total, coefficient)

    def _without_momentum(
        self, parameter: int, groups: Sequence[Hyperparameters]
    ) -> Sequence[Hyperparameters]:
        from foreprop.compression.dgctraining import without_momentum

        number = self._group_of[parameter]
        if self._announced is not groups:
            self._announced, self._plain = groups, {}
        if number not in self._plain:  # the same object for all slices, and for the whole step
            about = (groups[number], self._settled[number], self._names[parameter])
            self._plain[number] = without_momentum(*about)
        return [self._plain.get(other, group) for other, group in enumerate(groups)]

    def _total(
        self, tensors: SliceTensors, ranks: Sequence[int], scale: float = 1.0
    ) -> torch.Tensor:
        if tensors.piece.number not in self._votes:
            return super()._total(tensors, ranks, scale)
        from foreprop.compression.onebit import vote

        for rank in ranks:  # raw ones are of a small slice, or not finite
            vote(tensors.gradients[rank].tensor)
        return vote(super()._total(tensors, ranks))

    def export_master(self, slice_: int) -> bytes:
        """The slice's values in full, and its image if that is another."""
        tensors = self._slices[slice_]
        if tensors.shown is None or tensors.wire_dtype != tensors.parameter.dtype:
            return super().export_master(slice_)
        part = tensors.extent.part
        return encode_state({MASTER: part(tensors.parameter), IMAGE: part(tensors.shown)})


def move_image(image: torch.Tensor, change: torch.Tensor, *, exact: bool) -> None:
    """The same operation on both sides of the wire, so that images are the same bits."""
    if exact:
        np.bitwise_xor(bits_of(image), bits_of(change), out=bits_of(image))
    else:
        np.add(image.numpy(), change.numpy(), out=image.numpy())


def bits_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Of a flat, contiguous tensor; the same memory."""
    bits: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return bits


def word_sum(tensor: torch.Tensor) -> int:
    """By which a change of its memory shows, short of two that cancel out."""
    bits = bits_of(tensor)
    words = bits.view(np.uint32 if tensor.element_size() >= 4 else np.uint16)
    return int(np.add.reduce(words, dtype=np.uint32))
