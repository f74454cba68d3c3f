"""All-reduce of codes: the sum of the ranks' codes decodes to the sum of what they encoded.

This holds for random-k, whose elements all ranks draw alike (Stich et al., Sparsified SGD with
Memory, 2018): the sum of the chosen elements is the chosen elements of the sum. Each rank keeps
what it has left out (error feedback, algorithm 1) and adds it to its next gradient. Every rank
decodes the same sum and makes the same update, so there is no image beside the values.

Random-k draws a piece's elements by the piece's number, which is the same on all ranks. A chunk
with a code is summed in memory of its own: for each piece its elements, or their code, then the
marks of a parameter that ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foreprop.core.codec import EXACT, NONE, Choice, Place, codec_of
from foreprop.core.manifest import ParameterInfo
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag
from foreprop.engine.memory import bytes_of
from foreprop.engine.tensors import DTYPES
from foreprop.errors import ConfigError
from foreprop.features.collectives.gpu import DeviceWork
from foreprop.features.collectives.gradientsums import MARKS, GradientSums, StepSettings
from foreprop.features.collectives.group import Group
from foreprop.features.collectives.order import Piece
from foreprop.features.compression.choosing import SliceCodec, check_choices, describe
from foreprop.features.compression.codecs import make
from foreprop.features.compression.residuals import Residuals
from foreprop.params.setup import Setup

_FLOAT_BYTES = 4


class _Part(NamedTuple):
    """Where a piece lies in the sum of its chunk, in elements."""

    piece: Piece
    chunk: int
    begin: int
    elems: int
    marks: int


def check_summed(choices: Sequence[Choice], parameters: Sequence[ParameterInfo]) -> None:
    """Raises `ConfigError` for codecs that are not for these parameters, or cannot be added up."""
    check_choices(choices, parameters)
    for info in parameters:
        if (codec := codec_of(info.name, choices)) in EXACT - {NONE}:
            raise ConfigError(
                f"compression: {codec} is chosen for {info.name}, whose gradients collectives add"
                " up: that takes randomk. Of 'hybrid' only tables by rows are on servers, which"
                f" take {codec}; use architecture='p2p', or leave it out, before the patterns that"
                f" match it: {{{info.name!r}: 'none', ...}}"
            )


class CodedSums(GradientSums):
    """Sums codes of the pieces that have a codec, side by side with the elements of all others."""

    def __init__(
        self, setup: Setup, settings: StepSettings, group: Group, device: DeviceWork
    ) -> None:
        super().__init__(setup, settings, group, device)
        choices = setup.config.codecs
        pieces = [piece for chunk in self.chunks for piece in chunk.pieces]
        self.slices = {
            piece: Slice(number, *piece, server=0) for number, piece in enumerate(pieces)
        }
        self._coded: dict[int, SliceCodec] = {}
        for slice_ in self.slices.values():
            info = setup.infos[slice_.parameter]
            name = codec_of(info.name, choices)
            if name != NONE:
                codec = make(name)
                coded = SliceCodec(slice_, codec, codec, None, DTYPES[info.dtype])
                if coded.gains:
                    self._coded[slice_.number] = coded
        self.residuals = Residuals(setup.infos, self._coded, rank=group.rank)
        self.kept = (self.residuals,)
        self._parts: dict[int, list[_Part]] = {}  # by parameter, in chunks that have a code
        for chunk in self.chunks:
            if not any(self.slices[piece].number in self._coded for piece in chunk.pieces):
                continue
            begin = 0
            for piece in chunk.pieces:
                parameter = piece.parameter
                elems = self.size_bytes(piece) // self._dtypes[parameter].itemsize
                marks = MARKS if piece.stop_elems == self.elems[parameter] else 0
                part = _Part(piece, chunk.number, begin, elems, marks)
                self._parts.setdefault(parameter, []).append(part)
                begin += elems + marks
        self._sent: dict[int, torch.Tensor] = {}  # this step's sums, done or under way, by chunk
        self.raw_pushed_bytes = 0  # what would have been sent without codecs
        self.raw_reply_bytes = 0  # nothing comes back but sums
        self._choices = choices

    def describe(self) -> str:
        return describe(self._choices)

    def tell_scale(self, step: int, inverse: torch.Tensor) -> None:
        """Do nothing: where workers update, codes are not added up."""

    def size_bytes(self, piece: Piece) -> int:
        coded = self._coded.get(self.slices[piece].number)
        return super().size_bytes(piece) if coded is None else coded.most_bytes

    def chunk_sizes_bytes(self) -> list[int]:
        return [sum(map(self.size_bytes, chunk.pieces)) for chunk in self.chunks]

    # Before the sum.
    def fill(self, chunk: int, step: int) -> torch.Tensor:
        whole = super().fill(chunk, step)
        pieces = self.chunks[chunk].pieces
        self.raw_pushed_bytes += sum(super(CodedSums, self).size_bytes(piece) for piece in pieces)
        if not any(self.slices[piece].number in self._coded for piece in pieces):
            return whole
        self.residuals.announce(step, self._settings.scale_at(step))
        tensors = [tensor for piece in pieces for tensor in self._encode(piece, step)]
        sent = self._sent[chunk] = torch.cat(tensors)
        return sent

    def _encode(self, piece: Piece, step: int) -> list[torch.Tensor]:
        parameter, start, stop = piece
        total = self._sum_of(parameter)
        slice_ = self.slices[piece]
        coded, values = self._coded.get(slice_.number), total[start:stop]
        marks = total[stop:] if stop == self.elems[parameter] else total[:0]
        if coded is None:
            return [values, marks]
        if self.flags[parameter] & Flag.NO_GRADIENT:  # what is left out waits for a gradient
            return [torch.zeros(coded.most_bytes // _FLOAT_BYTES), marks]
        state = self.residuals.of(slice_.number, step)
        code = coded.codec.encode(values, state, Place(step, slice_.number, self._rank))
        return [coded.tensor_of(code), marks]

    # After the sum.
    def maybe_aggregate(self, parameter: int, step: int) -> torch.Tensor | None:
        for piece, chunk, begin, elems, marks in self._parts.get(parameter, ()):
            sent = self._sent[chunk][begin : begin + elems + marks]
            slice_, total = self.slices[piece], self._sum_of(parameter)
            values = total[piece.start_elems : piece.stop_elems]
            coded = self._coded.get(slice_.number)
            if coded is None:
                values.copy_(sent[:elems])
            else:
                place = Place(step, slice_.number, self._rank)
                coded.codec.decode(bytes_of(sent[:elems]), values, place)
            if marks:
                total[piece.stop_elems :].copy_(sent[elems:])
        return super().maybe_aggregate(parameter, step)
