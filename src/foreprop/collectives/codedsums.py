"""Sums of codes: what all-reduce adds up decodes to the sum of what the ranks have encoded.

That holds of random-k, whose elements all ranks draw alike (Stich et al., Sparsified SGD with
Memory, 2018): the sum of the chosen elements is the chosen elements of the sum. Each rank keeps
what it has left out (error feedback, algorithm 1) and adds it to its next gradient. Every rank
decodes the same sum and makes the same update, so there is no image beside the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foreprop.collectives.gpu import DeviceWork
from foreprop.collectives.gradientsums import MARKS, GradientSums, StepSettings
from foreprop.collectives.group import Group
from foreprop.compression.choosing import SliceCodec, check_choices
from foreprop.compression.codecs import make
from foreprop.compression.residuals import Residuals
from foreprop.core.codec import EXACT, NONE, Choice, Place, codec_of
from foreprop.core.manifest import ParameterInfo
from foreprop.core.order import Chunk, Piece
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag
from foreprop.errors import ConfigError
from foreprop.path.memory import bytes_of
from foreprop.path.tensors import DTYPES
from foreprop.servers.setup import Setup

_FLOAT_BYTES = 4


class _Part(NamedTuple):
    """Where a piece is in the sum of its chunk: its elements, or their code, then the marks."""

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
    """Of pieces with a codec the chosen elements are summed, side by side with all others."""

    def __init__(
        self, setup: Setup, settings: StepSettings, group: Group, device: DeviceWork
    ) -> None:
        super().__init__(setup, settings, group, device)
        choices = setup.config.codecs
        pieces = [piece for chunk in self.chunks for piece in chunk.pieces]
        self.slices = {
            piece: Slice(number, *piece, server=0) for number, piece in enumerate(pieces)
        }
        """By piece: what its elements are drawn by, the same on all ranks."""
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
        self._places: dict[int, list[_Part]] = {}
        """By parameter: its pieces, in chunks that have a code."""
        for chunk in self.chunks:
            if any(self.slices[piece].number in self._coded for piece in chunk.pieces):
                self._lay_out(chunk)
        self._sent: dict[int, torch.Tensor] = {}
        """By chunk, what was, or is being, summed of this step."""
        self.raw_pushed_bytes = 0
        """What has crossed, as it would be without codecs."""
        self.raw_reply_bytes = 0
        """Nothing comes back but sums."""

    def tell_scale(self, step: int, inverse: torch.Tensor) -> None:
        """Nothing: where workers update, codes are not added up."""

    def _lay_out(self, chunk: Chunk) -> None:
        begin = 0
        for piece in chunk.pieces:
            info = self._parameters[piece.parameter]
            elems = self.size_bytes(piece) // self._dtypes[piece.parameter].itemsize
            marks = MARKS if piece.stop_elems == info.elems else 0
            place = _Part(piece, chunk.number, begin, elems, marks)
            self._places.setdefault(piece.parameter, []).append(place)
            begin += elems + marks

    def size_bytes(self, piece: Piece) -> int:
        coded = self._coded.get(self.slices[piece].number)
        return super().size_bytes(piece) if coded is None else coded.most_bytes

    def chunk_sizes_bytes(self) -> list[int]:
        return [sum(map(self.size_bytes, chunk.pieces)) for chunk in self.chunks]

    # Before the sum.
    def fill(self, chunk: int, step: int) -> torch.Tensor:
        """The codes of this rank's pieces, to be replaced by their sums."""
        whole = super().fill(chunk, step)
        pieces = self.chunks[chunk].pieces
        self.raw_pushed_bytes += sum(super(CodedSums, self).size_bytes(piece) for piece in pieces)
        if not any(self.slices[piece].number in self._coded for piece in pieces):
            return whole
        self.residuals.announce(step, self._settings.scale_at(step))
        parts = [part for piece in pieces for part in self._encoded(piece, step)]
        sent = self._sent[chunk] = torch.cat(parts)
        return sent

    def _encoded(self, piece: Piece, step: int) -> list[torch.Tensor]:
        """And the marks that follow it."""
        parameter, start, stop = piece
        total = self._sum_of(parameter)
        slice_ = self.slices[piece]
        coded, values = self._coded.get(slice_.number), total[start:stop]
        marks = total[stop:] if stop == self._parameters[parameter].elems else total[:0]
        if coded is None:
            return [values, marks]
        if self.flags[parameter] & Flag.NO_GRADIENT:  # what is left out waits for a gradient
            return [torch.zeros(coded.most_bytes // _FLOAT_BYTES), marks]
        state = self.residuals.of(slice_.number, step)
        code = coded.codec.encode(values, state, Place(step, slice_.number, self._rank))
        return [coded.tensor_of(code), marks]

    # After the sum.
    def maybe_aggregate(self, parameter: int, step: int) -> torch.Tensor | None:
        for place in self._places.get(parameter, ()):
            self._decode(place, step)
        return super().maybe_aggregate(parameter, step)

    def _decode(self, found: _Part, step: int) -> None:
        """Into the parameter's own sum."""
        piece, chunk, begin, elems, marks = found
        sent = self._sent[chunk][begin : begin + elems + marks]
        slice_, total = self.slices[piece], self._sum_of(piece.parameter)
        values = total[piece.start_elems : piece.stop_elems]
        coded = self._coded.get(slice_.number)
        if coded is None:
            values.copy_(sent[:elems])
        else:
            place = Place(step, slice_.number, self._rank)
            coded.codec.decode(bytes_of(sent[:elems]), values, place)
        if marks:
            total[piece.stop_elems :].copy_(sent[elems:])
