"""Residuals: what lossy codecs keep of gradients that did not cross yet, slice by slice.

Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), section 3.2; Karimireddy et al.,
Error Feedback Fixes SignSGD (ICML 2019), algorithm 2. Every process that pushes to a server has its
own: a worker, or the relay of a node's workers. Where workers update, a server has residuals of the
averages with which it answers (Tang et al., DoubleSqueeze, ICML 2019). Residuals are as large as
gradients, so they are multiplied with the loss's scale where that changes. A checkpoint has them
for an unscaled loss.

A push may turn out not to count. Where workers update, a slice's next round tells whether one has
counted: if the next is of a later step, it has. Another round of the same step means that the one
before was closed, or its step skipped; unless it *builds on* it, with the last round's average in
what is averaged. Where servers may leave pushes out, they say which. Until then there are both
states, with the round and without. Encoded once more, a round has the same bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from foreprop.core.codec import Place
from foreprop.core.collect import NEVER
from foreprop.core.frames import Round, SendFrame
from foreprop.core.manifest import ParameterInfo
from foreprop.core.wire import ROUND_SHIFT, Flag, Header
from foreprop.engine.plane import Plane
from foreprop.errors import ConfigError, RemoteProtocolError
from foreprop.features.compression.choosing import SliceCodec
from foreprop.features.compression.codecs import TensorCodec

Arrays = Mapping[str, torch.Tensor]
OF_AVERAGES = "average's "
"""The prefix of the names of servers' arrays, in what rank 0 saves."""


def round_of(push: SendFrame | Header) -> Round:
    """The round of a push: its step, and which of the step's rounds."""
    return push.step, push.flags >> ROUND_SHIFT


class SliceResidual:
    """The residual of one slice: a codec's arrays, as the rounds that counted have left them."""

    __slots__ = ("_open", "_tried", "arrays", "scale")

    def __init__(
        self, arrays: Arrays, scale: float, *, tried: Arrays | None = None, open_: Round = NEVER
    ) -> None:
        self.arrays = arrays
        self.scale = scale  # of the loss, as the arrays have it
        self._open = open_  # the round that may still not count
        self._tried = tried or {}  # the arrays as that round would leave them

    def use_scale(self, scale: float) -> None:
        factor, self.scale = scale / self.scale, scale
        if factor != 1.0:
            for array in self.arrays.values():
                array.mul_(factor)

    def follow(self, round_: Round, scale: float, *, builds_on: bool = False) -> None:
        """Begin a round; ``scale`` was the loss's when the last step was made."""
        if self._open == round_:  # it is encoded once more
            return
        last, self._open = self._open, NEVER
        if last != NEVER and (last[0] < round_[0] or builds_on):
            before, self.arrays, self._tried = self.arrays, self._tried, self.arrays
            self._add_missing(self.arrays, before, scale)
            self.scale = scale
        self.use_scale(scale)

    def _add_missing(self, arrays: Arrays, before: Arrays, scale: float) -> None:
        """Add what a round lacked that began, with these arrays, before its scale was known.

        A loop's scaler tells its scale only then.
        """
        factor = scale / self.scale - 1.0
        if factor:
            for key, array in arrays.items():
                array.add_(before[key], alpha=factor)

    def begin(self, round_: Round) -> Arrays:
        """The arrays that this round's encoding changes in place; after `follow`."""
        if not self._tried:
            self._tried = {key: torch.empty_like(array) for key, array in self.arrays.items()}
        for key, array in self.arrays.items():
            self._tried[key].copy_(array)
        self._open = round_
        return self._tried

    def give_up(self) -> None:
        """Leave out the open round: its code is not sent, or does not count."""
        self._open = NEVER

    def before(self, step: int, scale: float) -> Arrays:
        """Copies of the arrays for an unscaled loss, as rounds of earlier steps have left them."""
        if self._open == NEVER or self._open[0] >= step:
            return {key: array / self.scale for key, array in self.arrays.items()}
        copies = {key: array.clone() for key, array in self._tried.items()}
        self._add_missing(copies, self.arrays, scale)
        return {key: array / scale for key, array in copies.items()}


class PlaneResiduals(MutableMapping[int, SliceResidual]):
    """Residuals that the native plane keeps, of a server's index or ``Plane.WORKER``, by slice."""

    def __init__(self, plane: Plane, index: int, slices: Mapping[int, SliceCodec]) -> None:
        self._plane, self._index, self._slices = plane, index, slices

    def __getitem__(self, number: int) -> SliceResidual:
        kept, tried = (torch.empty(self._slices[number].elems) for _ in range(2))
        scale, open_ = ctypes.c_double(), (ctypes.c_int64 * 2)()
        about = (kept.data_ptr(), tried.data_ptr(), ctypes.byref(scale), open_)
        if not self._plane.ask("fp_residual", self._index, number, *about):
            raise KeyError(number)
        round_ = (open_[0], open_[1])
        return SliceResidual({"error": kept}, scale.value, tried={"error": tried}, open_=round_)

    def __setitem__(self, number: int, residual: SliceResidual) -> None:
        if residual.arrays:  # else its codec remembers nothing
            self._put(number, residual.arrays["error"], residual.scale)

    def __delitem__(self, number: int) -> None:
        self._put(number, torch.empty(0), 1.0)

    def _put(self, number: int, kept: torch.Tensor, scale: float) -> None:
        about = (kept.data_ptr(), len(kept), scale)
        self._plane.ask("fp_put_residual", self._index, number, *about)

    def __iter__(self) -> Iterator[int]:
        return (number for number in self._slices if self.get(number) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Residuals:
    """The residuals of one worker or relay, or of a server's ``averages``.

    ``kept`` has them where the native plane encodes. ``told`` says the loss's scale in a step where
    nobody announces it here.

    Sending threads use them, each those of its server's slices; on a server one thread at a time
    those of a slice. ``some_count``: servers may leave pushes out, and tell. Checkpoints are made
    and loaded between two steps, when nothing is being sent.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        slices: Mapping[int, SliceCodec],
        *,
        rank: int,
        averages: bool = False,
        some_count: bool = False,
        kept: MutableMapping[int, SliceResidual] | None = None,
        told: Callable[[int], float] | None = None,
    ) -> None:
        self.ranks = range(rank, rank + 1)
        """The ranks whose saved residuals it loads; a relay goes by its node's first."""
        self._some_count = some_count
        self._parameters = parameters
        self._slices = slices
        self._averages = averages
        self._lock = threading.Lock()
        self._kept = {} if kept is None else kept
        self._told = told
        self._scales: dict[int, float] = {}  # of the loss, by step

    def _codec_of(self, number: int) -> TensorCodec:
        coded = self._slices[number]
        return (coded.average_codec if self._averages else None) or coded.codec

    def _of(self, number: int, step: int) -> SliceResidual:
        kept = self._kept.get(number)
        if kept is None:
            arrays = self._codec_of(number).new_state(self._slices[number].elems)
            kept = self._kept[number] = SliceResidual(arrays, self.scale_at(step))
        return kept

    def announce(self, step: int, scale: float) -> None:
        """Have the loss's scale count from this step on, before the step's first push.

        Where workers update, it is the scale of the step before.
        """
        with self._lock:
            for past in [known for known in self._scales if known < step - 1]:
                del self._scales[past]
            self._scales[step] = scale

    def of(self, slice_: int, step: int) -> Arrays:
        """The slice's arrays, which an encoding in this step changes in place."""
        kept = self._of(slice_, step)
        kept.use_scale(self.scale_at(step))
        return kept.arrays

    def may_not_count(self, flags: int) -> bool:
        """Whether a push with these flags may yet turn out not to count."""
        return self._some_count or bool(flags & Flag.GRADIENT)

    def follow(self, slice_: int, round_: Round, *, builds_on: bool = False) -> None:
        """Begin a slice's round that may not count, with a gradient or without."""
        self._of(slice_, round_[0]).follow(round_, self.scale_at(round_[0]), builds_on=builds_on)

    def give_up(self, slice_: int) -> None:
        """Leave out a slice's last push. Receiving threads, before the push is answered."""
        if (kept := self._kept.get(slice_)) is not None:
            kept.give_up()

    def scale_at(self, step: int) -> float:
        if self._told is not None:  # of the last round, before this step
            return self._told(step - 1)
        with self._lock:
            known = [announced for announced in self._scales if announced <= step]
            return self._scales[max(known)] if known else 1.0

    def encoded(
        self, frame: SendFrame, raw: memoryview, image: torch.Tensor | None = None
    ) -> memoryview:
        """The code of a payload that is about to leave, or ``raw`` if it is to go as it is.

        ``image`` (elems,) is what decays, for a codec whose gradients have the weight decay.
        """
        number, coded = frame.slice, self._slices[frame.slice]
        codec, values = self._codec_of(number), coded.tensor_of(raw)
        if not codec.exact and not np.isfinite(values.numpy()).all():
            return raw  # nobody may lose an infinity: it is what a scaler looks for
        kept, may_not_count = self._of(number, frame.step), self.may_not_count(frame.flags)
        state = kept.begin(round_of(frame)) if may_not_count else self.of(number, frame.step)
        if image is not None:
            values = self.with_decay(frame, values, image)
        scale = self.scale_at(frame.step)
        place = Place(frame.step, number, self.ranks.start, scale)
        data = codec.encode(values, state, place)
        if len(data) < len(raw):
            return data
        if may_not_count:
            kept.give_up()
        return raw

    def with_decay(
        self, frame: SendFrame, values: torch.Tensor, image: torch.Tensor
    ) -> torch.Tensor:
        """A gradient of the scaled loss with the weight decay that its slice is to have."""
        decay = self._slices[frame.slice].decay * self.scale_at(frame.step)
        return torch.add(values, image, alpha=decay)

    def elems(self, number: int) -> int | None:
        """The number of elements of a slice that has a codec; None for another one."""
        return self._slices[number].elems if number in self._slices else None

    # Checkpoints.
    def get(self, number: int, step: int) -> Arrays:
        """Copies of a slice's arrays before this step; empty if there are none yet."""
        kept = self._kept.get(number)
        return {} if kept is None else kept.before(step, self.scale_at(step))

    def put(self, number: int, arrays: Mapping[str, Any]) -> None:
        """Replace one slice's arrays; without any it begins anew. Raises `RemoteProtocolError`."""
        state = self._codec_of(number).new_state(self._slices[number].elems)
        flat = (isinstance(each, torch.Tensor) and each.dim() == 1 for each in arrays.values())
        if arrays.keys() - state.keys() or not all(flat):
            raise RemoteProtocolError(f"slice {number} keeps {list(state)}, not {list(arrays)}")
        for key, array in arrays.items():
            state[key].copy_(array)
        self._kept[number] = SliceResidual(state, 1.0)

    def whole(self, step: int) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of all arrays before this step, in parameters' shapes, by parameter and array."""
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
        """Replace all arrays; those not named begin anew. Returns which were taken."""
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
            self._kept[number] = SliceResidual(arrays, 1.0)
        return taken


def divided(
    states: Sequence[Mapping[str, Any]], *, ranks: Container[int], world_size: int, averages: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """The part of ``ranks`` in what all ranks have saved, so that the sum of all stays as it was.

    Each rank has its own again; those of ranks that are no more are added to rank 0's. Where the
    sum of gradients is divided by the number of ranks (``averages``), they are multiplied by the
    ratio of these numbers; residuals of averages are not.
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
    """Raise `ConfigError` for anything else than a list of what ranks have saved."""
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
