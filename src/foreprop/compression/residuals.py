"""What lossy codecs keep of gradients that did not cross yet (error feedback), slice by slice.

Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), section 3.2; Karimireddy et al.,
Error Feedback Fixes SignSGD (ICML 2019), algorithm 2. Whoever pushes to a server has its own: a
worker, or the relay of a node's workers. They are numbers of gradients, and so are multiplied with
the loss's scale where that changes.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from foreprop.compression.choosing import SliceCodec
from foreprop.core.codec import Place
from foreprop.core.frames import SendFrame
from foreprop.core.manifest import ParameterInfo
from foreprop.core.wire import Flag
from foreprop.errors import ConfigError, RemoteProtocolError

Arrays = Mapping[str, torch.Tensor]


class Residuals:
    """Of one worker or relay. Sending threads use them, each those of its server's slices."""

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        slices: Mapping[int, SliceCodec],
        *,
        rank: int,
    ) -> None:
        self.ranks = range(rank, rank + 1)
        """Whose saved residuals it loads. A relay goes by its node's first rank."""
        self._parameters = parameters
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

    def encoded(
        self, frame: SendFrame, raw: memoryview, image: torch.Tensor | None = None
    ) -> memoryview:
        """The code of a gradient that is about to leave, or ``raw`` if it is to go as it is.

        ``image`` is what decays, (elems,), of a codec whose gradients have the weight decay.
        """
        coded = self._slices[frame.slice]
        codec, values = coded.codec, coded.tensor_of(raw)
        if not codec.exact and (
            frame.flags & Flag.GRADIENT or not np.isfinite(values.numpy()).all()
        ):
            return raw  # nobody may lose an infinity: it is what a scaler looks for
        state = self.of(frame.slice, frame.step)
        if image is not None:
            values = self.with_decay(frame, values, image)
        scale = self.scale_at(frame.step)
        place = Place(frame.step, frame.slice, self.ranks.start, scale)
        data = codec.encode(values, state, place)
        return data if len(data) < len(raw) else raw

    def with_decay(
        self, frame: SendFrame, values: torch.Tensor, image: torch.Tensor
    ) -> torch.Tensor:
        """A gradient of the scaled loss with the weight decay that its slice is to have."""
        decay = self._slices[frame.slice].decay * self.scale_at(frame.step)
        return torch.add(values, image, alpha=decay)

    def elems(self, number: int) -> int | None:
        """Of a slice that has a codec; None of another one."""
        return self._slices[number].elems if number in self._slices else None

    # Checkpoints: of an unscaled loss. Between steps: nothing is being sent.
    def get(self, number: int) -> Arrays:
        """Copies of the slice's arrays; none if there are none yet."""
        scale = self._scale_of.get(number, 1.0)
        return {key: array / scale for key, array in self._arrays.get(number, {}).items()}

    def put(self, number: int, arrays: Mapping[str, Any]) -> None:
        """Go on from such arrays of one slice, none: anew. Raises `RemoteProtocolError`."""
        state = self._slices[number].codec.new_state(self._slices[number].elems)
        if arrays.keys() - state.keys() or not all(map(_is_flat, arrays.values())):
            raise RemoteProtocolError(f"slice {number} keeps {list(state)}, not {list(arrays)}")
        for key, array in arrays.items():
            state[key].copy_(array)
        self._arrays[number], self._scale_of[number] = state, 1.0

    def whole(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter and array, copies in the parameter's shape, of an unscaled loss."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for number in self._arrays:
            piece = self._slices[number].piece
            info = self._parameters[piece.parameter]
            for key, array in self.get(number).items():
                parts = found.setdefault(info.name, {})
                if key not in parts:
                    parts[key] = torch.zeros(info.shape)
                flat = parts[key].view(-1)[piece.start_elems : piece.stop_elems]
                flat.copy_(array)
        return found

    def replace(self, whole: Mapping[str, Arrays]) -> set[tuple[str, str]]:
        """Go on from such arrays; what is not named begins anew. Returns what was taken."""
        self._arrays.clear()
        self._scale_of.clear()
        taken = set()
        for number, coded in self._slices.items():
            info = self._parameters[coded.piece.parameter]
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
                taken.add((info.name, key))
            self._arrays[number] = arrays
            self._scale_of[number] = 1.0
        return taken


def _is_flat(array: Any) -> bool:
    return isinstance(array, torch.Tensor) and array.dim() == 1


def divided(
    states: Sequence[Mapping[str, Any]],
    *,
    ranks: Container[int],
    world_size: int,
    averages: bool,
) -> dict[str, dict[str, torch.Tensor]]:
    """The part of these ranks of what all ranks have saved, so that their sum is as it was.

    Each has its own again; those of ranks that are no more are added to rank 0's. Where the sum of
    gradients is divided by the number of ranks (``averages``), they are multiplied with its ratio.
    """
    ratio = world_size / len(states) if averages else 1.0
    own: dict[str, dict[str, torch.Tensor]] = {}
    for number, state in enumerate(states):
        if (number if number < world_size else 0) not in ranks:
            continue
        for name, key, array in entries(state):
            parts = own.setdefault(name, {})
            parts[key] = parts[key] + array * ratio if key in parts else array * ratio
    return own


def check_states(states: Any) -> None:
    """Raises `ConfigError` for anything else than a list of what ranks have saved."""
    if not isinstance(states, Sequence) or not all("residuals" in state for state in states):
        states = ()
    if not states:
        raise ConfigError(
            "states must be what session.state_dict() gave on all ranks, as a list in their order"
        )


def entries(state: Mapping[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, arrays in state["residuals"].items():
        for key, array in arrays.items():
            yield name, key, array
