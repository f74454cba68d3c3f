"""What lossy codecs keep of gradients that did not cross yet (error feedback), slice by slice.

Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), section 3.2; Karimireddy et al.,
Error Feedback Fixes SignSGD (ICML 2019), algorithm 2. A worker's residuals are its own. They are
numbers of gradients, and so are multiplied with the loss's scale where that changes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from foreprop.compression.choosing import SliceCodec
from foreprop.core.manifest import Manifest
from foreprop.errors import ConfigError

Arrays = Mapping[str, torch.Tensor]


class Residuals:
    """Of one worker. Sending threads use them, each those of its server's slices."""

    def __init__(self, manifest: Manifest, slices: Mapping[int, SliceCodec]) -> None:
        self._manifest = manifest
        self._slices = slices
        self._lock = threading.Lock()
        self._arrays: dict[int, Arrays] = {}
        self._scale_of: dict[int, float] = {}  # by slice, of the loss as its arrays have it
        self._scales: dict[int, float] = {}  # by step, of the loss

    def announce(self, step: int, scale: float) -> None:
        """The loss's scale from this step on. Training thread, before the step's first push."""
        with self._lock:
            for past in [known for known in self._scales if known < step - 1]:
                del self._scales[past]
            self._scales[step] = scale

    def of(self, slice_: int, step: int) -> Arrays:
        """The slice's arrays, to be changed in place by an encoding in this step."""
        arrays = self._arrays.get(slice_)
        if arrays is None:
            coded = self._slices[slice_]
            arrays = self._arrays[slice_] = coded.codec.new_state(coded.elems)
        if arrays and self._scales:
            scale = self.scale_at(step)
            factor = scale / self._scale_of.get(slice_, scale)
            self._scale_of[slice_] = scale
            if factor != 1.0:
                for array in arrays.values():
                    array.mul_(factor)
        return arrays

    def scale_at(self, step: int) -> float:
        """The loss's, in this step."""
        with self._lock:
            known = [announced for announced in self._scales if announced <= step]
            return self._scales[max(known)] if known else 1.0

    # Checkpoints. Training thread, between steps: nothing is being sent.
    def whole(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter and array, copies in the parameter's shape, of an unscaled loss."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for number, arrays in self._arrays.items():
            piece = self._slices[number].piece
            info = self._manifest.parameters[piece.parameter]
            for key, array in arrays.items():
                parts = found.setdefault(info.name, {})
                if key not in parts:
                    parts[key] = torch.zeros(info.shape)
                flat = parts[key].view(-1)[piece.start_elems : piece.stop_elems]
                torch.div(array, self._scale_of.get(number, 1.0), out=flat)
        return found

    def replace(self, whole: Mapping[str, Arrays]) -> None:
        """Go on from such arrays; what is not named begins anew."""
        self._arrays.clear()
        self._scale_of.clear()
        for number, coded in self._slices.items():
            info = self._manifest.parameters[coded.piece.parameter]
            given = whole.get(info.name)
            if given is None:
                continue
            arrays = coded.codec.new_state(coded.elems)
            for key in arrays.keys() & given.keys():
                flat = given[key].reshape(-1)
                if flat.numel() != info.elems:
                    raise ConfigError(
                        f"state has {flat.numel()} elements of {info.name}'s {key}, which has"
                        f" {info.elems}"
                    )
                arrays[key].copy_(flat[coded.piece.start_elems : coded.piece.stop_elems])
            self._arrays[number] = arrays
            self._scale_of[number] = 1.0


def divided(
    states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int, averages: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's part of what all ranks have saved, so that their sum is as it was.

    Each has its own again; those of ranks that are no more are added to rank 0's. Where the sum of
    gradients is divided by the number of ranks (``averages``), they are multiplied with its ratio.
    Raises `ConfigError` for anything else than a list of such states.
    """
    if isinstance(states, Mapping) or not states:
        raise ConfigError(
            "states must be what session.state_dict() gave on all ranks, as a list in their order"
        )
    ratio = world_size / len(states) if averages else 1.0
    own: dict[str, dict[str, torch.Tensor]] = {}
    for number, state in enumerate(states):
        if (number if number < world_size else 0) != rank:
            continue
        for name, key, array in _entries(state):
            parts = own.setdefault(name, {})
            parts[key] = parts[key] + array * ratio if key in parts else array * ratio
    return own


def _entries(state: Mapping[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, arrays in state["residuals"].items():
        for key, array in arrays.items():
            yield name, key, array
