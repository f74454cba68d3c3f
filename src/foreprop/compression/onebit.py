"""One bit per element: 1-bit SGD, EF-signSGD, and signSGD with majority vote.

On the wire: two float32 levels, for the elements that are not negative and for the negative ones,
then a bit for each element, 1 if it is negative. Zeros count as not negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from foreprop.compression.bitpacking import pack, packed_bytes, unpack
from foreprop.compression.errorfeedback import ErrorFeedback
from foreprop.compression.payloads import Stateless, array_of, check_size, spans
from foreprop.core.codec import Place
from foreprop.errors import RemoteProtocolError
from foreprop.path.memory import bytes_of

_LEVELS_BYTES = 8


class Sides(NamedTuple):
    """Of a slice: how many elements are not negative or are, and their sums."""

    others: int
    negatives: int
    other_sum: float
    negative_sum: float


Levels = tuple[float, float]


@dataclass(slots=True)
class OneBit(Stateless):
    """Each element by its sign and one of two levels. What is not finite makes both NaN."""

    name: str
    levels_of: Callable[[Sides], Levels]

    def most_bytes(self, elems: int) -> int:
        return _LEVELS_BYTES + packed_bytes(elems, 1)

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        data = torch.empty(self.most_bytes(len(values)), dtype=torch.uint8)
        is_negative = torch.empty(len(values), dtype=torch.bool)
        for span in spans(len(values)):
            torch.lt(values[span], 0, out=is_negative[span])
        levels = torch.tensor(self.levels_of(_sides(values, is_negative)))
        if not bool(levels.isfinite().all()):
            levels.fill_(torch.nan)
        data[:_LEVELS_BYTES].view(torch.float32).copy_(levels)
        pack(is_negative.view(torch.uint8).numpy(), 1, data[_LEVELS_BYTES:].numpy())
        return bytes_of(data)

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        check_size(self.name, data, len(out), self.most_bytes(len(out)))
        levels = array_of(data, torch.float32, 0, 2)
        other, negative = levels.tolist()
        is_nan = bool(levels.isnan().all())
        if not is_nan and not (bool(levels.isfinite().all()) and other >= 0 >= negative):
            raise RemoteProtocolError(
                f"{self.name}: the levels are {other} and {negative}; they must be at least and at"
                " most 0"
            )
        packed = np.frombuffer(data, np.uint8, offset=_LEVELS_BYTES)
        is_negative = torch.from_numpy(unpack(packed, 1, len(out))).view(torch.bool)
        for span in spans(
            len(out)
        ):  # of two products one is 0; masked_fill_ takes ten times as long
            ones = out[span].copy_(is_negative[span])
            ones.mul_(negative).add_(is_negative[span].logical_not(), alpha=other)


def _sides(values: torch.Tensor, is_negative: torch.Tensor) -> Sides:
    negatives, other_sum, negative_sum = 0, 0.0, 0.0
    for span in spans(len(values)):
        negatives += int(torch.count_nonzero(is_negative[span]))
        other_sum += _sum(values[span].clamp(min=0))
        negative_sum += _sum(values[span].clamp(max=0))
    return Sides(len(values) - negatives, negatives, other_sum, negative_sum)


def _sum(values: torch.Tensor) -> float:
    """Finite if all values are."""
    total = float(values.sum())
    return total if abs(total) < torch.inf else float(values.sum(dtype=torch.float64))


def _means(sides: Sides) -> Levels:
    return sides.other_sum / max(1, sides.others), sides.negative_sum / max(1, sides.negatives)


def _mean_magnitude(sides: Sides) -> Levels:
    elems = max(1, sides.others + sides.negatives)
    mean = (sides.other_sum - sides.negative_sum) / elems
    return mean, -mean


def _units(sides: Sides) -> Levels:
    unit = 1.0 + 0.0 * sides.other_sum + 0.0 * sides.negative_sum  # NaN of what is not finite
    return unit, -unit


def one_bit() -> ErrorFeedback:
    """Seide et al. 2014, section 3.2: the means of the negative elements and of the others.

    The paper's columns are slices here. With error feedback.
    """
    return ErrorFeedback(OneBit("1bit", _means))


def ef_sign() -> ErrorFeedback:
    """Karimireddy et al. 2019, algorithm 1: sign(v) * norm1(v) / d, with error feedback."""
    return ErrorFeedback(OneBit("efsign", _mean_magnitude))


def sign() -> OneBit:
    """Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems (2018).

    Algorithm 2, what a worker sends: 1 or -1, without error feedback. The server's update is the
    `vote`, with a learning rate for signs.
    """
    return OneBit("sign", _units)


def vote(total: torch.Tensor) -> torch.Tensor:
    """The majority of all workers' signs, of their sum, in place; 0 where they are equally many.

    What is not finite becomes NaN: ``torch.sign`` would hide it.
    """
    for span in spans(len(total)):
        part = total[span]
        lost = part * 0.0  # NaN of what is not finite
        torch.sign(part, out=part).add_(lost)
    return total
