"""Codecs that round each element: to 16 bits, or to integers with a scale for each block.

A cast is to the nearest, ties to even. For int8, int4 and int2 a block of float32 is sent as one
scale, and for each element the nearest whole number q of scales. int8 and int4: Dettmers et al.,
8-bit Optimizers via Block-wise Quantization (2021), section 2.1, with linear codes:
scale = max|x| / L, q = round(x / scale).

On the wire: float32 scales, one per block, then the codes q + L in 2, 4 or 8 bits each: four, two
or one of them in a byte, the first one lowest.

A slice may be short, as where a model is scaled down: then calls cost more than arithmetic. So it
is numpy's, whose calls cost less than torch's, and the last block is filled up with zeros. The
native library makes int8 and int4 where there is one, in one call that lets other threads run, with
the bits of what is here: this is its specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foreprop.core.codec import Place
from foreprop.engine.memory import bytes_of
from foreprop.engine.native import maybe_library
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.kernels import (
    ErrorFeedback,
    Stateless,
    array_of,
    check_size,
    copy_parts,
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
    library: Any = None
    """What has the same in native code, if anything: blocks of `BLOCK_ELEMS` and the largest."""

    @property
    def bits(self) -> int:
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def most_bytes(self, elems: int) -> int:
        return 4 * self._blocks(elems) + packed_bytes(elems, self.bits)

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        if self.library is not None:
            return self.encode_with(values, None, place)
        elems = len(values)
        data = np.empty(self.most_bytes(elems), np.uint8)
        scales = data[: 4 * self._blocks(elems)].view(np.float32)
        rows = np.zeros((len(scales), self.block_elems), np.float32)
        rows.reshape(-1)[:elems] = values.numpy()
        with np.errstate(all="ignore"):
            is_broken = self._set_scales(self.limit_of(rows), scales)
            rows /= np.where(scales > 0, scales, np.float32(1))[:, None]  # of a NaN as well
            if is_broken:
                rows[np.isnan(scales)] = 0.0
            self._round(rows)
        pack(rows.reshape(-1)[:elems].astype(np.uint8), self.bits, data[scales.nbytes :])
        return data.data

    def encode_with(
        self, values: torch.Tensor, error: torch.Tensor | None, place: Place
    ) -> memoryview:
        """Encode ``values`` + ``error``; ``error`` becomes what is left out, if all are finite."""
        data = np.empty(self.most_bytes(len(values)), np.uint8)
        kept = None if error is None else error.data_ptr()
        about = (self.levels, values.data_ptr(), kept, len(values), data.ctypes.data)
        self.library.fp_quantise(*about)
        return data.data

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        elems, target = len(out), out.numpy()
        check_size(self.name, data, elems, self.most_bytes(elems))
        if not elems:
            return
        if self.library is not None:
            code = np.frombuffer(data, np.uint8).ctypes.data
            if self.library.fp_dequantise(self.levels, code, elems, out.data_ptr()):
                return  # else what is wrong is said below
        scales = np.frombuffer(data, np.float32, self._blocks(elems))
        codes = unpack(np.frombuffer(data, np.uint8, offset=scales.nbytes), self.bits, elems)
        with np.errstate(all="ignore"):
            if ((scales < 0) | (scales > self._largest_scale())).any():
                raise RemoteProtocolError(f"{self.name}: a scale is negative or infinite")
            if int(codes.max()) > 2 * self.levels:
                raise RemoteProtocolError(f"{self.name}: a code is above {2 * self.levels}")
            np.copyto(target, codes)
            target -= np.float32(self.levels)
            target *= np.repeat(scales, self.block_elems)[:elems]

    def _largest_scale(self) -> np.float32:
        return _LARGEST / np.float32(self.levels)

    def _blocks(self, elems: int) -> int:
        return -(-elems // self.block_elems)

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
    return _by_the_largest("int8", 127)


def int4() -> ErrorFeedback:
    """0.53 bytes per element; an error of at most max|x| / 14, beside float32's own rounding."""
    return _by_the_largest("int4", 7)


def _by_the_largest(name: str, levels: int) -> ErrorFeedback:
    made = BlockQuantiser(
        name, levels, BLOCK_ELEMS, lambda rows: np.abs(rows).max(axis=1), maybe_library()
    )
    return ErrorFeedback(made, None if made.library is None else made.encode_with)


def int2() -> ErrorFeedback:
    """0.28 bytes per element: -1, 0 or 1 times a scale.

    Max, Quantizing for Minimum Distortion (1960), table I: with three levels a normal
    distribution loses least, 0.190 of its variance, with levels at 1.224 sigma and the borders
    halfway. Sigma follows from the mean magnitude of what is not zero, which overflows later than
    squares. No element's error is larger than the element, so the codec can answer pushes.
    """
    return ErrorFeedback(BlockQuantiser("int2", 1, BLOCK_ELEMS, _best_scale_of_three))


def _best_scale_of_three(rows: Floats) -> Floats:
    magnitudes = np.abs(rows)
    means = magnitudes.sum(axis=1) / np.maximum(np.count_nonzero(rows, axis=1), 1)
    limits = np.minimum(_THREE_LEVELS * means, magnitudes.max(axis=1))
    narrow: Floats = limits.astype(np.float32)
    return narrow


# Codes in bytes.
def packed_bytes(elems: int, bits: int) -> int:
    return -(-elems * bits // 8)


def pack(codes: Bytes, bits: int, packed: Bytes) -> None:
    """Pack ``codes`` (elems,), each below ``2**bits``, into ``packed`` (packed_bytes,)."""
    if bits == 8:
        packed[:] = codes
        return
    whole = np.zeros((len(packed), 8 // bits), np.uint8)
    whole.reshape(-1)[: len(codes)] = codes
    packed[:] = whole[:, 0]
    for place in range(1, 8 // bits):
        packed |= whole[:, place] << place * bits


def unpack(packed: Bytes, bits: int, elems: int) -> Bytes:
    """The codes (elems,); raises `RemoteProtocolError` if a bit behind the last code is set."""
    if bits == 8:
        return packed
    codes = np.empty(len(packed) * 8 // bits, np.uint8)
    for place in range(8 // bits):
        np.bitwise_and(packed >> place * bits, (1 << bits) - 1, out=codes[place :: 8 // bits])
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
