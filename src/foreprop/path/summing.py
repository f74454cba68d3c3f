"""The arithmetic of `core.aggregation.Aggregation`, in place, alike on servers and ring ranks.

Every operation is element-wise, and squares are added up exactly (`core.norm`), so no bit depends
on where a slice begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from foreprop.core.aggregation import Aggregation, Reduction
from foreprop.core.norm import BIN_BITS, BINS, ZERO, SquareSum

_AT_ONCE_ELEMS = 65_536
"""Few enough for the cache, and for the sum of a bin to stay below 2**53, where it is exact."""
_LEAST_TOP = -36
"""So that 2**(-_LEAST_TOP * BIN_BITS) is finite; lower squares are of float64 only, and nothing."""


_HALVES = (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype, *, workers: int) -> torch.dtype:
    """What gradients of several workers are added up in: half precision would lose small ones."""
    return torch.float32 if dtype in _HALVES and workers > 1 else dtype


def add_up(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum in the given order, in the first one's memory unless ``dtype`` is another."""
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total += gradient
    return total


def finish_sum(
    total: torch.Tensor, reduction: Reduction, *, workers: int, scale: float = 1.0
) -> None:
    """The ranks' gradients have been added up: make the mean, and take out the loss's scale."""
    if workers > 1 and reduction == "mean":
        total /= workers
    if scale != 1.0:
        total *= 1.0 / scale


def start_average(parameter: torch.Tensor) -> torch.Tensor:
    """A moving average that begins with the parameter's value; in float32 at least."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(wide, copy=True)


def move_average(average: torch.Tensor, parameter: torch.Tensor, decay: float) -> None:
    """``average = decay * average + (1 - decay) * parameter``."""
    average.lerp_(parameter.detach().to(average.dtype), 1 - decay)


def square_sum(gradient: torch.Tensor) -> SquareSum:
    """Of all elements; the same for any way of cutting the gradient."""
    flat, total = gradient.reshape(-1), ZERO
    for start in range(0, flat.numel(), _AT_ONCE_ELEMS):
        total = total.plus(_square_sum_of(flat[start : start + _AT_ONCE_ELEMS]))
    return total


def _square_sum_of(part: torch.Tensor) -> SquareSum:
    rest = part.to(torch.float64, copy=True).square_()  # exact, unless the gradient is float64
    largest = float(rest.max())
    if not math.isfinite(largest):
        return SquareSum(beyond=float(rest[~rest.isfinite()].sum()))
    if not largest:
        return ZERO
    top = max((math.frexp(largest)[1] - 1) // BIN_BITS, _LEAST_TOP)
    rest *= math.ldexp(1.0, -top * BIN_BITS)
    whole = torch.empty_like(rest)
    bins = []
    for _ in range(BINS):
        torch.floor(rest, out=whole)
        bins.append(int(whole.sum()))
        rest.sub_(whole).mul_(2.0**BIN_BITS)
    return SquareSum(top, (bins[0], bins[1], bins[2]))


def clip(gradient: torch.Tensor, aggregation: Aggregation, coefficient: float = 1.0) -> None:
    """By norm, whose ``coefficient`` it is, or element by element, as ``torch.nn.utils`` does."""
    if coefficient != 1.0:
        gradient *= coefficient
    limit = aggregation.clip_grad_value
    if limit is not None:
        gradient.clamp_(-limit, limit)
