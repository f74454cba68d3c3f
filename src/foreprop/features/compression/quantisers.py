"""Codecs that round each element: to 16 bits, or to integers with a scale for each block.

A cast is to the nearest, ties to even. For int8, int4 and int2 a block of float32 is sent as one
scale, and for each element the nearest whole number q of scales. int8 and int4: Dettmers et al.,
8-bit Optimizers via Block-wise Quantization (2021), section 2.1, with linear codes:
scale = max|x| / L, q = round(x / scale).

On the wire: float32 scales, one per block, then the codes q + L in 2, 4 or 8 bits each: four, two
or one of them in a byte, the first one lowest. Codes of a byte lie in the bytes of one
little-endian word, so all words are shifted together.

A slice may be short, as where a model is scaled down: then calls cost more than arithmetic. So it
is numpy's, whose calls cost less than torch's, and the last block is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from foreprop.core.codec import Place
from foreprop.engine.memory import bytes_of
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.kernels import (
    ErrorFeedback,
    Stateless,
    array_of,
    check_size,
    copy_parts,
    spans,
)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK_ELEMS = 128
_LEAST_SCALE = 2.0**-100
"""Blocks of smaller scales are sent as zeros: dividing by them would lose bits, or overflow."""
_LARGEST = np.float32(3.4e38)
"""Somewhat below the largest float32: a scale times L must not round to infinity."""
_ROUNDING = np.float32(1.5 * 2**23)
"""A summand that rounds: from 2**23 to 2**24 float32 has the whole numbers only, so a sum is
rounded to the nearest, to even if two are as near."""
_THREE_LEVELS = 1.224 / (2 / np.pi) ** 0.5
"""1.224 standard deviations of a normal distribution, as a factor of its mean magnitude."""
_LOWEST = {2: 0x0303_0303, 4: 0x0F0F}  # the bits of codes in a word, one code in each byte


def largest_of(rows: Floats) -> Floats:
    largest: Floats = np.abs(rows).max(axis=1)
    return largest


@dataclass(slots=True)
class BlockQuantiser(Stateless):
    """Rounds to whole numbers of a scale, from ``-levels`` to ``levels``, block by block.

    The last block may be shorter. A block with an element that is not finite has a NaN as its
    scale, and is decoded as NaNs.
    """

    name: str
    levels: int
    """L: 1, up to 7 or up to 127, in 2, 4 or 8 bits."""
    block_elems: int
    limit_of: Callable[[Floats], Floats]
    """Gives what L scales are for each row, (rows, elems) to (rows,); larger elements are clipped.
    Zeros in a row do not change it."""

    @property
    def bits(self) -> int:
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def most_bytes(self, elems: int) -> int:
        return 4 * self._blocks(elems) + packed_bytes(elems, self.bits)

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        return self._encode(values.numpy(), None)

    def encode_with(self, values: torch.Tensor, error: torch.Tensor, place: Place) -> memoryview:
        """Encode ``values`` + ``error``; ``error`` becomes what is left out, if all are finite.

        The bits are those of `encode` and `decode`. If there are several parts the sum is made
        twice: parts stay in the cache, which is quicker than memory for it.
        """
        return self._encode(values.numpy(), error.numpy())

    def _encode(self, values: Floats, error: Floats | None) -> memoryview:
        elems = len(values)
        data = np.empty(self.most_bytes(elems), np.uint8)
        scales = data[: 4 * self._blocks(elems)].view(np.float32)
        packed = data[scales.nbytes :]
        codes = packed if self.bits == 8 else np.empty(elems, np.uint8)
        parts = [
            (span, slice(span.start // self.block_elems, self._blocks(span.stop)))
            for span in spans(elems)
        ]
        rows = np.empty((0, 0), np.float32)
        with np.errstate(all="ignore"):
            limits = np.empty(len(scales), np.float32)
            for span, blocks in parts:
                rows = self._rows(values, error, span, blocks)
                limits[blocks] = self.limit_of(rows)
            is_broken = self._set_scales(limits, scales)
            divisors: Floats = np.where(scales > 0, scales, np.float32(1))  # of a NaN as well
            for span, blocks in parts:
                if len(parts) > 1:
                    rows = self._rows(values, error, span, blocks)
                quotients = rows / divisors[blocks, None]
                if is_broken:
                    quotients[np.isnan(scales[blocks])] = 0.0
                self._round(quotients)
                flat = quotients.reshape(-1)[: span.stop - span.start]
                np.copyto(codes[span], flat, casting="unsafe")
                if error is not None and not is_broken:
                    quotients -= np.float32(self.levels)
                    quotients *= scales[blocks, None]  # as decoded
                    np.subtract(rows.reshape(-1)[: len(flat)], flat, out=error[span])
        if self.bits < 8:
            pack(codes, self.bits, packed)
        return data.data

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        elems = len(out)
        check_size(self.name, data, elems, self.most_bytes(elems))
        if not elems:
            return
        scales = np.frombuffer(data, np.float32, self._blocks(elems))
        target = out.numpy()
        with np.errstate(all="ignore"):
            if ((scales < 0) | (scales > self._largest_scale())).any():
                raise RemoteProtocolError(f"{self.name}: a scale is negative or infinite")
            packed = np.frombuffer(data, np.uint8, offset=scales.nbytes)
            codes = unpack(packed, self.bits, elems)
            if int(codes.max()) > 2 * self.levels:
                raise RemoteProtocolError(f"{self.name}: a code is above {2 * self.levels}")
            for span, blocks in self._equal_parts(elems):
                part = target[span]
                np.copyto(part, codes[span])
                part -= np.float32(self.levels)
                rows = part.reshape(blocks.stop - blocks.start, -1)  # the same memory
                rows *= scales[blocks, None]

    def _largest_scale(self) -> np.float32:
        return _LARGEST / np.float32(self.levels)

    def _blocks(self, elems: int) -> int:
        return -(-elems // self.block_elems)

    def _equal_parts(self, elems: int) -> Iterator[tuple[slice, slice]]:
        """Spans of elements and of their blocks; the blocks of a pair are of equal length."""
        whole = elems // self.block_elems * self.block_elems
        for span in spans(whole):
            yield span, slice(span.start // self.block_elems, span.stop // self.block_elems)
        if whole < elems:
            last = self._blocks(elems)
            yield slice(whole, elems), slice(last - 1, last)

    def _rows(self, values: Floats, error: Floats | None, span: slice, blocks: slice) -> Floats:
        """The sum of values and error, a row for each block; perhaps the memory of ``values``."""
        elems, rows = span.stop - span.start, blocks.stop - blocks.start
        filled = rows * self.block_elems
        if error is None and filled == elems:
            return values[span].reshape(rows, -1)
        part = np.empty(filled, np.float32)
        if error is None:
            part[:elems] = values[span]
        else:
            np.add(values[span], error[span], out=part[:elems])
        part[elems:] = 0.0
        return part.reshape(rows, -1)

    def _set_scales(self, limits: Floats, scales: Floats) -> bool:
        """Set all scales; returns whether a block has something that is not finite."""
        np.minimum(limits / np.float32(self.levels), self._largest_scale(), out=scales)
        scales[scales < _LEAST_SCALE] = 0.0
        is_finite = np.isfinite(limits)
        if is_finite.all():
            return False
        scales[~is_finite] = np.nan
        return True

    def _round(self, quotients: Floats) -> None:
        """Round to q + L, whole numbers in float32, in place."""
        quotients += _ROUNDING
        quotients -= _ROUNDING - np.float32(self.levels)
        np.maximum(quotients, np.float32(0), out=quotients)
        np.minimum(quotients, np.float32(2 * self.levels), out=quotients)


def int8() -> ErrorFeedback:
    """1.03 bytes per element; an error of at most max|x| / 254, beside float32's own rounding."""
    return _with_feedback(BlockQuantiser("int8", 127, BLOCK_ELEMS, largest_of))


def int4() -> ErrorFeedback:
    """0.53 bytes per element; an error of at most max|x| / 14, beside float32's own rounding."""
    return _with_feedback(BlockQuantiser("int4", 7, BLOCK_ELEMS, largest_of))


def int2() -> ErrorFeedback:
    """0.28 bytes per element: -1, 0 or 1 times a scale.

    Max, Quantizing for Minimum Distortion (1960), table I: with three levels a normal
    distribution loses least, 0.190 of its variance, with levels at 1.224 sigma and the borders
    halfway. Sigma follows from the mean magnitude of what is not zero, which overflows later than
    squares. No element's error is larger than the element, so the codec can answer pushes.
    """
    return _with_feedback(BlockQuantiser("int2", 1, BLOCK_ELEMS, _best_scale_of_three))


def _best_scale_of_three(rows: Floats) -> Floats:
    magnitudes = np.abs(rows)
    means = magnitudes.sum(axis=1) / np.maximum(np.count_nonzero(rows, axis=1), 1)
    limits = np.minimum(_THREE_LEVELS * means, magnitudes.max(axis=1))
    narrow: Floats = limits.astype(np.float32)
    return narrow


def _with_feedback(quantiser: BlockQuantiser) -> ErrorFeedback:
    return ErrorFeedback(quantiser, quantiser.encode_with)


# Codes in bytes.
def packed_bytes(elems: int, bits: int) -> int:
    return -(-elems * bits // 8)


def pack(codes: Bytes, bits: int, packed: Bytes) -> None:
    """Pack ``codes`` (elems,), each below ``2**bits``, into ``packed`` (packed_bytes,)."""
    if bits == 8:
        packed[:] = codes
        return
    per_byte = 8 // bits
    if missing := -len(codes) % per_byte:
        codes = np.append(codes, np.zeros(missing, np.uint8))
    words = codes.view(f"<u{per_byte}")
    mixed = words | words >> (8 - bits)
    for place in range(2, per_byte):
        mixed |= words >> place * (8 - bits)
    np.copyto(packed, mixed, casting="unsafe")  # the lowest byte


def unpack(packed: Bytes, bits: int, elems: int) -> Bytes:
    """The codes (elems,); raises `RemoteProtocolError` if a bit behind the last code is set."""
    if bits == 8:
        return packed
    per_byte = 8 // bits
    words = packed.astype(f"<u{per_byte}")
    spread = words | words << (8 - bits)
    for place in range(2, per_byte):
        spread |= words << place * (8 - bits)
    spread &= _LOWEST[bits]
    codes: Bytes = spread.view(np.uint8)
    if codes[elems:].any():
        raise RemoteProtocolError("packed codes: bits are set after the last one")
    return codes[:elems]


# Casts.
@dataclass(slots=True)
class SixteenBit(Stateless):
    """A cast to 16 bits; beyond the range of float16 values become infinite, as in torch."""

    name: str
    dtype: torch.dtype

    def most_bytes(self, elems: int) -> int:
        return 2 * elems

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        narrow = torch.empty(len(values), dtype=self.dtype)
        copy_parts(narrow, values)
        return bytes_of(narrow)

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        check_size(self.name, data, len(out), self.most_bytes(len(out)))
        copy_parts(out, array_of(data, self.dtype, 0, len(out)))


def bf16() -> SixteenBit:
    return SixteenBit("bf16", torch.bfloat16)


def fp16() -> SixteenBit:
    return SixteenBit("fp16", torch.float16)
