"""The image: the values of a slice that all workers have, as servers know it; and special updates.

With an exact codec the image is what the server has. With another one the server's values, the
*masters*, are ahead of it by what did not cross yet. Where workers may have values of different
steps there is no image: values go by themselves, and as they are unless their codec is exact.

With ``dgc`` the update has no momentum, for workers have it. With a codec that votes the update is
by the majority's signs (Bernstein et al., signSGD with Majority Vote is Communication Efficient and
Fault Tolerant, 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from foreprop.core.codec import NONE, Place, codec_of, kind_of
from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.slicing import Slice
from foreprop.engine.plane import Plane
from foreprop.engine.slicestore import Codes, Groups
from foreprop.features.compression.averagecodes import AverageCodes
from foreprop.features.compression.choosing import SliceCodec, answers_differ, coded_slices
from foreprop.features.compression.codecs import traits_of
from foreprop.features.compression.dgc import without_momentum
from foreprop.features.compression.kernels import spans


class CodedSlices(Codes):
    """What is special about updates and answers of slices with codecs.

    ``scale_at``, ``plane``: see `AverageCodes`.
    """

    def __init__(
        self,
        manifest: Manifest,
        slices: Sequence[Slice],
        index: int,
        scale_at: Callable[[int], float],
        plane: Plane | None = None,
    ) -> None:
        self._manifest = manifest
        self._index = index
        self.coded: dict[int, SliceCodec] = {}
        self.averages = AverageCodes(manifest.parameters, self.coded, index, scale_at, plane)
        choices = manifest.knobs.compression
        names = [codec_of(info.name, choices) for info in manifest.parameters]
        self._is_dgc = [kind_of(name) == "dgc" for name in names]
        self._votes = [name != NONE and traits_of(name).votes for name in names]
        self.votes: set[int] = set()
        self.clipped: set[int] = set()
        self.adopt([piece for piece in slices if piece.server == index])
        self._settled = manifest.optimizer.groups
        self._group_of = [info.group for info in manifest.parameters]
        self._names = [info.name for info in manifest.parameters]
        self.answers_differ = answers_differ(manifest)
        self._pushes_are_updates = bool(manifest.knobs.staleness)
        self._announced: Groups = ()
        self._plain: dict[int, Hyperparameters] = {}  # of these, without momentum, by group

    def adopt(self, pieces: Sequence[Slice]) -> None:
        """Take in slices of this server: at the start, or when another one is lost."""
        new = coded_slices(self._manifest, pieces)
        self.coded.update(new)
        self.averages.adopt(new)
        for piece in pieces:
            if self._votes[piece.parameter]:
                self.votes.add(piece.number)
            elif self._is_dgc[piece.parameter] and piece.number in new:
                self.clipped.add(piece.number)

    def settings(self, piece: Slice, groups: Groups) -> Groups:
        """The settings of an update; raises `TrainingLoopError` if DGC's momentum changed."""
        number, name = self._group_of[piece.parameter], self._names[piece.parameter]
        if self._announced is not groups:
            self._announced, self._plain = groups, {}
        if number not in self._plain:  # the same object for all slices, and for the whole step
            self._plain[number] = without_momentum(groups[number], self._settled[number], name)
        return [self._plain.get(other, group) for other, group in enumerate(groups)]

    def by_itself(self, slice_: int, values: memoryview, step: int) -> memoryview:
        """The code of values where `answers_differ`, or the values, if that is no shorter."""
        coded = self.coded.get(slice_)
        codec = None if coded is None else coded.reply_codec
        if coded is None or codec is None or len(values) != coded.raw_bytes:
            return values
        data = codec.encode(coded.tensor_of(values), {}, Place(step, slice_, self._index))
        return data if len(data) < len(values) else values

    def answer(self, slice_: int, values: memoryview, step: int, *, is_average: bool) -> memoryview:
        if is_average:
            return self.averages.code(slice_, values)
        return self.by_itself(slice_, values, step)

    def before_sum(self, gradients: Sequence[torch.Tensor]) -> None:
        for gradient in gradients:  # raw ones are of a small slice, or not finite
            vote(gradient)

    def after_sum(self, total: torch.Tensor) -> torch.Tensor:
        if self._pushes_are_updates:
            return total  # each is one vote's share of the update
        return vote(total)

    def as_answered(self, slice_: int, average: torch.Tensor) -> torch.Tensor:
        return self.averages.as_answered(slice_, average)


def vote(total: torch.Tensor) -> torch.Tensor:
    """Turn a sum of signs, in place, into the majority's sign, or 0 where there is none.

    What is not finite becomes NaN: ``torch.sign`` would hide it.
    """
    for span in spans(len(total)):
        part = total[span]
        zero_or_nan = part * 0.0
        torch.sign(part, out=part).add_(zero_or_nan)
    return total


def move_image(image: torch.Tensor, change: torch.Tensor, *, exact: bool) -> None:
    """Add a change to an image, as both sides of the wire do, so that images are the same bits."""
    if exact:
        np.bitwise_xor(bits_of(image), bits_of(change), out=bits_of(image))
    else:
        np.add(image.numpy(), change.numpy(), out=image.numpy())


def bits_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bits of a flat, contiguous tensor; the same memory."""
    bits: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return bits


def word_sum(tensor: torch.Tensor) -> int:
    """A checksum that shows a change of the tensor, unless two changes cancel out."""
    bits = bits_of(tensor)
    words = bits.view(np.uint32 if tensor.element_size() >= 4 else np.uint16)
    return int(np.add.reduce(words, dtype=np.uint32))
