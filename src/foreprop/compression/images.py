"""The image: the values of a slice that all workers have, as servers know it.

With an exact codec it is what the server has. With another one the server's values, the *masters*,
are ahead of it by what did not cross yet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from foreprop.path.slicestore import SliceStore
from foreprop.path.tensors import IMAGE, MASTER, encode_state


class ImageStore(SliceStore):
    """Has images of the slices with a lossy codec; as with casts, they are what is shown."""

    def image_of(self, slice_: int) -> torch.Tensor:
        """The slice's, to be moved in place; from now on `install_value` compares with it."""
        tensors = self._slices[slice_]
        if tensors.shown is None:
            tensors.shown = tensors.extent.zeros(tensors.parameter.dtype)
        return tensors.extent.part(tensors.shown)

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
