"""The image: the values of a slice that all workers have, as servers know it; and special updates.

With an exact codec it is what the server has. With another one the server's values, the *masters*,
are ahead of it by what did not cross yet.

Of ``dgc`` the update has no momentum, which workers have. Of ``sign`` it is of the majority's signs
(Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from foreprop.compression.averagecodes import AverageCodes
from foreprop.compression.choosing import SliceCodec, coded_slices
from foreprop.core.codec import codec_of, kind_of
from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.slicing import Slice
from foreprop.path.slicestore import Groups


class CodedSlices:
    """What is special about updates by codes; see `path.slicestore.Codes`."""

    def __init__(
        self,
        manifest: Manifest,
        slices: Sequence[Slice],
        index: int,
        scale_at: Callable[[int], float],
    ) -> None:
        """``scale_at``: see `AverageCodes`."""
        self._manifest = manifest
        self.coded: dict[int, SliceCodec] = {}
        self.averages = AverageCodes(manifest.parameters, self.coded, index, scale_at)
        self.as_answered = self.averages.as_answered
        choices = manifest.knobs.compression
        self._kinds = [kind_of(codec_of(info.name, choices)) for info in manifest.parameters]
        self._votes: set[int] = set()
        """With those that are too small for a code."""
        self._accumulated: set[int] = set()
        """Their pushes have the momentum."""
        self.adopt([piece for piece in slices if piece.server == index])
        self._settled = manifest.optimizer.groups
        self._group_of = [info.group for info in manifest.parameters]
        self._names = [info.name for info in manifest.parameters]
        self._announced: Groups = ()
        self._plain: dict[int, Hyperparameters] = {}
        """By group, ``_announced`` without momentum."""

    def adopt(self, pieces: Sequence[Slice]) -> None:
        """These are the server's, too: at the start, or when another one is lost."""
        new = coded_slices(self._manifest, pieces)
        self.coded.update(new)
        self.averages.adopt(new)
        for piece in pieces:
            kind = self._kinds[piece.parameter]
            if kind == "sign":
                self._votes.add(piece.number)
            elif kind == "dgc" and piece.number in new:
                self._accumulated.add(piece.number)

    def are_clipped(self, slice_: int) -> bool:
        return slice_ in self._accumulated

    def settings(self, piece: Slice, groups: Groups) -> Groups:
        """Raises `TrainingLoopError` if DGC's momentum changed."""
        if piece.number not in self._accumulated:
            return groups
        from foreprop.compression.dgctraining import without_momentum

        number = self._group_of[piece.parameter]
        if self._announced is not groups:
            self._announced, self._plain = groups, {}
        if number not in self._plain:  # the same object for all slices, and for the whole step
            about = (groups[number], self._settled[number], self._names[piece.parameter])
            self._plain[number] = without_momentum(*about)
        return [self._plain.get(other, group) for other, group in enumerate(groups)]

    def before_sum(self, slice_: int, gradients: Sequence[torch.Tensor]) -> None:
        if slice_ in self._votes:
            from foreprop.compression.onebit import vote

            for gradient in gradients:  # raw ones are of a small slice, or not finite
                vote(gradient)

    def after_sum(self, slice_: int, total: torch.Tensor) -> torch.Tensor:
        if slice_ not in self._votes:
            return total
        from foreprop.compression.onebit import vote

        return vote(total)


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
