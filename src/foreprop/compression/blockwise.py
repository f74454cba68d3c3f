"""Integers with a scale for each block: int8 and int4, and what stochastic codecs share with them.

A block of float32 is sent as one scale, and for each element a whole number q of scales, rounded
to the nearest or stochastically. int8 and int4: Dettmers et al., 8-bit Optimizers via Block-wise
Quantization (2021), section 2.1, with linear codes: scale = max|x| / L, q = round(x / scale).

On the wire: float32 scales, one per block, then the codes q + L in 2, 4 or 8 bits each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from foreprop.compression.bitpacking import pack, packed_bytes, unpack
from foreprop.compression.errorfeedback import ErrorFeedback
from foreprop.compression.payloads import Stateless, array_of, check_size, generator_of, spans
from foreprop.core.codec import Place
from foreprop.errors import RemoteProtocolError
from foreprop.path.memory import bytes_of

BLOCK_ELEMS = 128
_LEAST_SCALE = 2.0**-100
"""Blocks of smaller scales are sent as zeros: dividing by them would lose bits, or overflow."""
_LARGEST = 3.4e38
"""Somewhat below the largest float32: a scale times L must not round to infinity."""
_ROUNDS = 1.5 * 2**23
"""From 2**23 to 2**24 float32 has the whole numbers only: a sum is rounded to the nearest, to even
if two are as near."""


def largest_of(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row, (rows,)."""
    return rows.abs().amax(1)


@dataclass(slots=True)
class BlockQuantiser(Stateless):
    """Whole numbers from ``-levels`` to ``levels`` of a scale. The last block may be shorter.

    A block with an element that is not finite has a NaN as its scale, and is decoded as NaNs.
    """

    name: str
    levels: int
    """L: 1, up to 7 or up to 127, in 2, 4 or 8 bits."""
    block_elems: int
    limit_of: Callable[[torch.Tensor], torch.Tensor]
    """What L scales are, for each row: float32 (rows, elems) to (rows,); others are clipped."""
    stochastic: bool = False

    @property
    def bits(self) -> int:
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def most_bytes(self, elems: int) -> int:
        return 4 * self._blocks(elems) + packed_bytes(elems, self.bits)

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        return self._encode(lambda span: values[span], len(values), place, None)

    def encode_with(self, values: torch.Tensor, error: torch.Tensor, place: Place) -> memoryview:
        """Encode ``values`` + ``error``; ``error`` becomes what is left out, if all are finite.

        The bits are those of `encode` and `decode`. The sum is made twice, in parts that stay in
        the cache: that is quicker than memory for it. For limits that zeros do not change.
        """

        def compensated(span: slice) -> torch.Tensor:
            elems = min(span.stop, len(values)) - span.start
            part = torch.empty(span.stop - span.start)
            torch.add(values[span], error[span], out=part[:elems])
            part[elems:] = 0.0
            return part

        return self._encode(compensated, len(values), place, error)

    def _encode(
        self,
        part_of: Callable[[slice], torch.Tensor],
        elems: int,
        place: Place,
        error: torch.Tensor | None,
    ) -> memoryview:
        """``part_of``: values of a span; with an ``error`` of whole blocks, the last one filled."""
        data = torch.empty(self.most_bytes(elems), dtype=torch.uint8)
        filled = elems if error is None else self._blocks(elems) * self.block_elems
        scale_bytes = 4 * self._blocks(elems)
        scales = data[:scale_bytes].view(torch.float32)
        scales.copy_(self._scales(part_of, filled))
        packed = data[scale_bytes:]
        codes = packed if self.bits == 8 else torch.empty(elems, dtype=torch.uint8)
        generator = generator_of(place, of_rank=True) if self.stochastic else None
        divisors = torch.where(scales > 0, scales, 1.0)[:, None]  # of a NaN as well
        broken = scales.isnan()[:, None]
        is_broken = bool(broken.any())
        for span, blocks in self._rows(filled):
            values, count = part_of(span), min(span.stop, elems) - span.start
            rows = values.view(blocks.stop - blocks.start, -1) / divisors[blocks]
            if is_broken:
                rows.masked_fill_(broken[blocks], 0.0)
            flat = self._rounded(rows, generator).view(-1)[:count]
            # torch's own cast to bytes takes three times as long
            np.copyto(codes[span].numpy(), flat.numpy(), casting="unsafe")
            if error is not None and not is_broken:
                rows.sub_(self.levels).mul_(scales[blocks, None])  # as decoded
                torch.sub(values[:count], flat, out=error[span])
        if self.bits < 8:
            pack(codes, self.bits, packed)
        return bytes_of(data)

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        check_size(self.name, data, len(out), self.most_bytes(len(out)))
        count = self._blocks(len(out))
        scales = array_of(data, torch.float32, 0, count)
        if bool(((scales < 0) | (scales > self._largest_scale())).any()):
            raise RemoteProtocolError(f"{self.name}: a scale is negative or infinite")
        packed = array_of(data, torch.uint8, 4 * count, packed_bytes(len(out), self.bits))
        codes = unpack(packed, self.bits, len(out))
        if any(int(codes[span].max()) > 2 * self.levels for span in spans(len(out))):
            raise RemoteProtocolError(f"{self.name}: a code is above {2 * self.levels}")
        for span, blocks in self._rows(len(out)):
            part = out[span].copy_(codes[span]).sub_(self.levels)
            part.view(blocks.stop - blocks.start, -1).mul_(scales[blocks, None])

    def _largest_scale(self) -> torch.Tensor:
        return torch.tensor(_LARGEST).div_(self.levels)

    def _blocks(self, elems: int) -> int:
        return -(-elems // self.block_elems)

    def _rows(self, elems: int) -> Iterator[tuple[slice, slice]]:
        """Elements and their blocks, of equal length in each pair."""
        whole = elems // self.block_elems * self.block_elems
        for span in spans(whole):
            yield span, slice(span.start // self.block_elems, span.stop // self.block_elems)
        if whole < elems:
            last = self._blocks(elems)
            yield slice(whole, elems), slice(last - 1, last)

    def _scales(self, part_of: Callable[[slice], torch.Tensor], elems: int) -> torch.Tensor:
        limits = torch.empty(self._blocks(elems))
        for span, blocks in self._rows(elems):
            limits[blocks] = self.limit_of(part_of(span).view(blocks.stop - blocks.start, -1))
        scales = torch.minimum(limits / self.levels, self._largest_scale())
        scales.masked_fill_(scales < _LEAST_SCALE, 0.0)
        return scales.masked_fill_(~limits.isfinite(), torch.nan)

    def _rounded(self, quotients: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """q + L, as whole parts of float32; in place.

        torch's own `round` and `floor` take several threads for any length.
        """
        if generator is None:
            quotients.add_(_ROUNDS).sub_(_ROUNDS - self.levels)
        else:  # the whole part of x + u is x on average
            noise = torch.rand(quotients.shape, generator=generator)
            quotients.add_(self.levels).add_(noise)
        return quotients.clamp_(0, 2 * self.levels)


def int8() -> ErrorFeedback:
    """1.03 bytes per element. At most max|x| / 254 from each, beside float32's own rounding."""
    return _with_feedback(BlockQuantiser("int8", 127, BLOCK_ELEMS, largest_of))


def int4() -> ErrorFeedback:
    """0.53 bytes per element. At most max|x| / 14 from each, beside float32's own rounding."""
    return _with_feedback(BlockQuantiser("int4", 7, BLOCK_ELEMS, largest_of))


def _with_feedback(quantiser: BlockQuantiser) -> ErrorFeedback:
    return ErrorFeedback(quantiser, quantiser.encode_with)
