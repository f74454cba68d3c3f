"""What lossy codecs keep of gradients that did not cross yet (error feedback), slice by slice.

Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), section 3.2; Karimireddy et al.,
Error Feedback Fixes SignSGD (ICML 2019), algorithm 2. Whoever pushes to a server has its own: a
worker, or the relay of a node's workers. Where workers update, a server has one of the averages
that answer (Tang et al., DoubleSqueeze, ICML 2019). They are numbers of gradients, and so are
multiplied with the loss's scale where that changes.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from foreprop.compression.choosing import SliceCodec
from foreprop.compression.codecs import TensorCodec
from foreprop.core.codec import Place
from foreprop.core.collect import NEVER, Round
from foreprop.core.frames import SendFrame
from foreprop.core.manifest import ParameterInfo
from foreprop.core.wire import ROUND_SHIFT, Flag, Header
from foreprop.errors import ConfigError, RemoteProtocolError

Arrays = Mapping[str, torch.Tensor]
OF_AVERAGES = "average's "
"""Before the names of servers' arrays, in what rank 0 saves."""


def round_of(push: SendFrame | Header) -> Round:
    """Of a gradient that workers use: its step, and which of the step's rounds."""
    return push.step, push.flags >> ROUND_SHIFT


class Kept:
    """What a codec keeps of one slice, as the rounds that counted have left it.

    Where workers update, a slice's next round tells whether one has counted: if it is of a later
    step, that was. Another round of the same step means that the one before was closed, or its step
    skipped. Until then there are both states. Encoded once more, a round has the same bytes.
    """

    __slots__ = ("_open", "_tried", "arrays", "scale")

    def __init__(self, arrays: Arrays, scale: float) -> None:
        self.arrays = arrays
        self.scale = scale
        """Of the loss, as the arrays have it."""
        self._open = NEVER  # the round that may still not count
        self._tried: Arrays = {}  # as it would leave the arrays

    def use_scale(self, scale: float) -> None:
        factor, self.scale = scale / self.scale, scale
        if factor != 1.0:
            for array in self.arrays.values():
                array.mul_(factor)

    def follow(self, round_: Round, scale: float, *, builds_on: bool = False) -> None:
        """This round begins; ``scale`` was the loss's when the last step was made.

        ``builds_on``: what it averages has the last round's average in it, which so counts.
        """
        if self._open == round_:  # it is encoded once more
            return
        last, self._open = self._open, NEVER
        if last != NEVER and (last[0] < round_[0] or builds_on):
            before, self.arrays, self._tried = self.arrays, self._tried, self.arrays
            self._add_missing(self.arrays, before, scale)
            self.scale = scale
        self.use_scale(scale)

    def _add_missing(self, arrays: Arrays, begun_with: Arrays, scale: float) -> None:
        """A loop's scaler tells its scale after the round has begun with another one's residual."""
        factor = scale / self.scale - 1.0
        if factor:
            for key, array in arrays.items():
                array.add_(begun_with[key], alpha=factor)

    def begin(self, round_: Round) -> Arrays:
        """To be changed in place by this round's encoding; after `follow`."""
        if not self._tried:
            self._tried = {key: torch.empty_like(array) for key, array in self.arrays.items()}
        for key, array in self.arrays.items():
            self._tried[key].copy_(array)
        self._open = round_
        return self._tried

    def give_up(self) -> None:
        """What this round's encoding has given is not sent."""
        self._open = NEVER

    def before(self, step: int, scale: float) -> Arrays:
        """Copies for an unscaled loss, as the rounds of earlier steps have left them."""
        if self._open == NEVER or self._open[0] >= step:
            return {key: array / self.scale for key, array in self.arrays.items()}
        copies = {key: array.clone() for key, array in self._tried.items()}
        self._add_missing(copies, self.arrays, scale)
        return {key: array / scale for key, array in copies.items()}


class Residuals:
    """Of one worker or relay, or of a server's ``averages``.

    Sending threads use them, each those of its server's slices; of a server one thread at a time
    those of a slice.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        slices: Mapping[int, SliceCodec],
        *,
        rank: int,
        averages: bool = False,
    ) -> None:
        self.ranks = range(rank, rank + 1)
        """Whose saved residuals it loads. A relay goes by its node's first rank."""
        self._parameters = parameters
        self._slices = slices
        self._averages = averages
        self._lock = threading.Lock()
        self._kept: dict[int, Kept] = {}
        self._scales: dict[int, float] = {}  # by step, of the loss

    def _codec_of(self, number: int) -> TensorCodec:
        coded = self._slices[number]
        return (coded.average_codec if self._averages else None) or coded.codec

    def _of(self, number: int, step: int) -> Kept:
        kept = self._kept.get(number)
        if kept is None:
            arrays = self._codec_of(number).new_state(self._slices[number].elems)
            kept = self._kept[number] = Kept(arrays, self.scale_at(step))
        return kept

    def announce(self, step: int, scale: float) -> None:
        """The loss's scale from this step on. Training thread, before the step's first push.

        Where workers update: that of the step before.
        """
        with self._lock:
            for past in [known for known in self._scales if known < step - 1]:
                del self._scales[past]
            self._scales[step] = scale

    def of(self, slice_: int, step: int) -> Arrays:
        """The slice's arrays, to be changed in place by an encoding in this step."""
        kept = self._of(slice_, step)
        kept.use_scale(self.scale_at(step))
        return kept.arrays

    def follow(self, slice_: int, round_: Round, *, builds_on: bool = False) -> None:
        """Of a slice whose averages workers use: this round begins, with a gradient or without."""
        self._of(slice_, round_[0]).follow(round_, self.scale_at(round_[0]), builds_on=builds_on)

    def scale_at(self, step: int) -> float:
        """The loss's, in this step."""
        with self._lock:
            known = [announced for announced in self._scales if announced <= step]
            return self._scales[max(known)] if known else 1.0

    def encoded(
        self, frame: SendFrame, raw: memoryview, image: torch.Tensor | None = None
    ) -> memoryview:
        """The code of what is about to leave, or ``raw`` if it is to go as it is.

        ``image`` is what decays, (elems,), of a codec whose gradients have the weight decay.
        """
        number, coded = frame.slice, self._slices[frame.slice]
        codec, values = self._codec_of(number), coded.tensor_of(raw)
        if not codec.exact and not np.isfinite(values.numpy()).all():
            return raw  # nobody may lose an infinity: it is what a scaler looks for
        kept, in_round = self._of(number, frame.step), bool(frame.flags & Flag.GRADIENT)
        state = kept.begin(round_of(frame)) if in_round else self.of(number, frame.step)
        if image is not None:
            values = self.with_decay(frame, values, image)
        scale = self.scale_at(frame.step)
        place = Place(frame.step, number, self.ranks.start, scale)
        data = codec.encode(values, state, place)
        if len(data) < len(raw):
            return data
        if in_round:
            kept.give_up()
        return raw

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
    def get(self, number: int, step: int) -> Arrays:
        """Copies of the slice's arrays before this step; none if there are none yet."""
        kept = self._kept.get(number)
        return {} if kept is None else kept.before(step, self.scale_at(step))

    def put(self, number: int, arrays: Mapping[str, Any]) -> None:
        """Go on from such arrays of one slice, none: anew. Raises `RemoteProtocolError`."""
        state = self._codec_of(number).new_state(self._slices[number].elems)
        if arrays.keys() - state.keys() or not all(map(_is_flat, arrays.values())):
            raise RemoteProtocolError(f"slice {number} keeps {list(state)}, not {list(arrays)}")
        for key, array in arrays.items():
            state[key].copy_(array)
        self._kept[number] = Kept(state, 1.0)

    def whole(self, step: int) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter and array, copies in the parameter's shape, of an unscaled loss.

        As they are before this step.
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        for number in self._kept:
            piece = self._slices[number].piece
            info = self._parameters[piece.parameter]
            for key, array in self.get(number, step).items():
                parts = found.setdefault(info.name, {})
                if key not in parts:
                    parts[key] = torch.zeros(info.shape)
                flat = parts[key].view(-1)[piece.start_elems : piece.stop_elems]
                flat.copy_(array)
        return found

    def replace(self, whole: Mapping[str, Arrays]) -> set[tuple[str, str]]:
        """Go on from such arrays; what is not named begins anew. Returns what was taken."""
        self._kept.clear()
        taken = set()
        for number, coded in self._slices.items():
            info = self._parameters[coded.piece.parameter]
            given = whole.get(info.name)
            if given is None:
                continue
            arrays = self._codec_of(number).new_state(coded.elems)
            for key in arrays.keys() & given.keys():
                flat = given[key].reshape(-1)
                if flat.numel() != info.elems:
                    raise ConfigError(
                        f"state has {flat.numel()} elements of {info.name}'s {key}, which has"
                        f" {info.elems}"
                    )
                arrays[key].copy_(flat[coded.piece.start_elems : coded.piece.stop_elems])
                taken.add((info.name, key))
            self._kept[number] = Kept(arrays, 1.0)
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
    gradients is divided by the number of ranks (``averages``), they are multiplied with its ratio,
    but not those that are of averages.
    """
    ratio = world_size / len(states) if averages else 1.0
    own: dict[str, dict[str, torch.Tensor]] = {}
    for number, state in enumerate(states):
        if (number if number < world_size else 0) not in ranks:
            continue
        for name, key, array in entries(state):
            parts = own.setdefault(name, {})
            part = array if key.startswith(OF_AVERAGES) else array * ratio
            parts[key] = parts[key] + part if key in parts else part
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
