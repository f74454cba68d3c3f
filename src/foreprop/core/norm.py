"""A sum of squares that has the same bits whatever parts it was added up from, in any order.

Theory of operation (binned summation: Demmel and Nguyen, "Parallel reproducible summation", 2015).
The line of numbers is cut into bins of `BIN_BITS` bits, at fixed places. The bits that a square has
in one bin are a whole number, and whole numbers add up exactly. A sum keeps `BINS` bins, from that
of its largest square downwards. Which bins the total has depends on the largest square of all, not
on the parts: a part without that square has lower bins, too, which go when it is added to a part
with it. What is lost is below 2**-56 of the largest square, per element.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

from foreprop.errors import RemoteProtocolError

BIN_BITS = 28
BINS = 3
_LAYOUT = struct.Struct("!h3qd")
_LEAST_BIN = -(2**15)


class SquareSum(NamedTuple):
    """The sum of some elements' squares.

    ``top`` is the bin of the largest square; bin k has the bits from 2**(k * BIN_BITS) upwards.
    ``bins`` are the sums in the bins ``top``, ``top - 1``, ..., in units of their lowest bit.
    ``beyond`` is the sum of the squares that are infinite or not numbers.
    """

    top: int = _LEAST_BIN
    bins: tuple[int, int, int] = (0, 0, 0)
    beyond: float = 0.0

    def plus(self, other: SquareSum) -> SquareSum:
        high, low = (self, other) if self.top >= other.top else (other, self)
        lowered = (0,) * min(high.top - low.top, BINS) + low.bins
        first, second, third = (a + b for a, b in zip(high.bins, lowered, strict=False))
        return SquareSum(high.top, (first, second, third), self.beyond + other.beyond)

    @property
    def norm(self) -> float:
        """The square root of the sum: infinite or not a number if an element was."""
        first, second, third = self.bins
        total = (((first << BIN_BITS) + second) << BIN_BITS) + third
        if not total or self.beyond:
            return math.sqrt(self.beyond) if self.beyond > 0 else self.beyond
        try:
            return math.sqrt(math.ldexp(total, (self.top - BINS + 1) * BIN_BITS))
        except OverflowError:
            return math.inf

    def encode(self) -> bytes:
        return _LAYOUT.pack(self.top, *self.bins, self.beyond)


ENCODED_BYTES = _LAYOUT.size


def encode_square_sums(sums: Iterable[SquareSum]) -> bytes:
    return b"".join(part.encode() for part in sums)


def decode_square_sums(data: bytes | memoryview, *, count: int) -> list[SquareSum]:
    """The inverse of `encode_square_sums`; raises `RemoteProtocolError`."""
    if len(data) != count * ENCODED_BYTES:
        raise RemoteProtocolError(
            f"{count} sums of squares have {count * ENCODED_BYTES} bytes, got {len(data)}"
        )
    starts = range(0, len(data), ENCODED_BYTES)
    return [decode_square_sum(data[start : start + ENCODED_BYTES]) for start in starts]


ZERO = SquareSum()


def decode_square_sum(data: bytes | memoryview) -> SquareSum:
    """The inverse of `SquareSum.encode`; raises `RemoteProtocolError`."""
    if len(data) != ENCODED_BYTES:
        raise RemoteProtocolError(f"a sum of squares has {ENCODED_BYTES} bytes, got {len(data)}")
    top, first, second, third, beyond = _LAYOUT.unpack(data)
    if min(first, second, third) < 0 or beyond < 0:
        raise RemoteProtocolError(f"not a sum of squares: {first, second, third, beyond}")
    return SquareSum(top, (first, second, third), beyond)


class SendNormPart(NamedTuple):
    """Send a server's part of a step's sum of squares to ``rank``, unless all add up the parts."""

    step: int
    part: SquareSum
    rank: int = 0
