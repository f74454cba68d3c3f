"""One bit per element: 1-bit SGD, EF-signSGD, and signSGD with majority vote.

On the wire: two float32 levels, for the elements that are not negative and for the negative ones,
then a bit for each element, 1 if it is negative. Zeros count as not negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

import foreprop

_LEVELS_BYTES = 8
_AT_ONCE_ELEMS = 30_720
"""torch divides longer work among threads, of which every thread here would get a team."""


class _Signs:
    """Each element by its sign and one of two levels."""

    def levels_of(self, values: torch.Tensor, negatives: int) -> tuple[float, float]:
        """The levels of elements that are not negative, at least 0, and of the others, at most 0.

        There are ``negatives`` of the others.
        """
        raise NotImplementedError

    def most_bytes(self, elems: int) -> int:
        return _LEVELS_BYTES + -(-elems // 8)

    def encode(self, values: torch.Tensor) -> bytes:
        is_negative = values.numpy() < 0
        levels = self.levels_of(values, int(np.count_nonzero(is_negative)))
        bits = np.packbits(is_negative, bitorder="little")
        return np.array(levels, np.float32).tobytes() + bits.tobytes()

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        if len(data) != self.most_bytes(len(out)):
            raise ValueError(f"there must be {self.most_bytes(len(out))}")
        levels = np.frombuffer(data, np.float32, 2) + np.float32(0)  # no -0.0
        other, negative = levels.tolist()
        if not (math.inf > other >= 0 >= negative > -math.inf):
            raise ValueError(f"the levels are {other} and {negative}, not at least and at most 0")
        packed = np.frombuffer(data, np.uint8, offset=_LEVELS_BYTES)
        is_negative = np.unpackbits(packed, bitorder="little")
        if is_negative[len(out) :].any():
            raise ValueError("bits are set after the last one")
        np.take(levels, is_negative[: len(out)], out=out.numpy(), mode="clip")


@foreprop.register_codec
class OneBit(_Signs):
    """Seide et al. 2014, section 3.2: the means of the negative elements and of the others.

    The paper's columns are slices here.
    """

    name = "1bit"
    servers_update = True
    s_per_gb = (1.35, 0.40)

    def levels_of(self, values: torch.Tensor, negatives: int) -> tuple[float, float]:
        other_sum, negative_sum = _sums(values)
        others = len(values) - negatives
        return other_sum / max(1, others), negative_sum / max(1, negatives)


@foreprop.register_codec
class EfSign(_Signs):
    """Karimireddy et al. 2019, algorithm 1: sign(v) * norm1(v) / d, with error feedback."""

    name = "efsign"
    servers_update = True
    s_per_gb = (1.27, 0.40)

    def levels_of(self, values: torch.Tensor, negatives: int) -> tuple[float, float]:
        other_sum, negative_sum = _sums(values)
        mean = (other_sum - negative_sum) / max(1, len(values))
        return mean, -mean


@foreprop.register_codec
class Sign(_Signs):
    """Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems (2018).

    Algorithm 2, what a worker sends: 1 or -1, without error feedback. The update is the majority's
    sign, with a learning rate for signs.
    """

    name = "sign"
    keeps_error = False
    votes = True
    answer = "efsign"
    s_per_gb = (0.49, 0.40)

    def levels_of(self, values: torch.Tensor, negatives: int) -> tuple[float, float]:
        return 1.0, -1.0


def _sums(values: torch.Tensor) -> tuple[float, float]:
    """The sums of the elements above zero, and of those below."""
    above = below = 0.0
    for part in _parts(values):
        above += _sum(part.clamp(min=0))
        below += _sum(part.clamp(max=0))
    return above, below


def _parts(values: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, len(values), _AT_ONCE_ELEMS):
        yield values[start : start + _AT_ONCE_ELEMS]


def _sum(values: torch.Tensor) -> float:
    """The sum of the values, finite if they all are."""
    total = float(values.sum())
    return total if math.isfinite(total) else float(values.sum(dtype=torch.float64))
