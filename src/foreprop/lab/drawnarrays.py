"""Values and gradients of an emulated layer: no device computes them, but codecs see real ones.

A linear layer's gradient is a sum over samples of outer products, of what comes back to its outputs
and what went into its inputs (Rumelhart et al. 1986). So these are drawn, for a few samples: inputs
behind a ReLU, half of them zeros; outputs' gradients normal, with a scale of its own for each row.
Their products have the spread exponents and the low rank that lossless codecs, top-k and PowerSGD
live by. Each step has other draws, and each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_SAMPLES = 8
_ROW_SPREAD = 1.0
"""Standard deviation of the logarithm of rows' scales."""
_RELATIVE = 4e-3
"""Gradients over values: with SGD of 0.1 and momentum 0.9 values change by about 1e-3 of them."""


def shape_like(elems: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Of a scaled array: as many dimensions as `shape` has, but at most 2, and its proportions.

    A matrix's rows are the divisor of ``elems`` that comes nearest to them.
    """
    if len(shape) < 2:
        return (elems,)
    wanted = shape[0] * math.sqrt(elems / math.prod(shape))
    small = [number for number in range(1, math.isqrt(elems) + 1) if elems % number == 0]
    divisors = [*small, *(elems // number for number in small)]
    rows = min(divisors, key=lambda number: abs(math.log(number / wanted)))
    return rows, elems // rows


class DrawnArray:
    """One array's first values, and its gradients: float32 of ``shape``, a vector or a matrix.

    ``seed``: of this array; ``rank`` draws other gradients, the same values. ``touched``: the share
    of rows that a step touches, others being zeros; as of an embedding.
    """

    def __init__(
        self, shape: Sequence[int], *, seed: int, rank: int = 0, touched: float | None = None
    ) -> None:
        self._shape = tuple(shape)
        common = torch.Generator().manual_seed(seed)
        self._scale = math.sqrt(2 / shape[-1]) if len(shape) > 1 else 1.0  # He et al. 2015
        self.values = torch.randn(self._shape, generator=common).mul_(self._scale)
        rows = torch.randn(self._shape[0], generator=common).mul_(_ROW_SPREAD).exp_()
        self._row_scales = rows.mul_(_RELATIVE * self._scale / math.exp(_ROW_SPREAD**2))
        self._touched = touched
        self._own = torch.Generator().manual_seed(seed * 65_537 + rank)

    def gradient(self) -> torch.Tensor:
        """The next one; its root mean square is about 0.004 of the values'."""
        own, rows = self._own, self._row_scales
        if self._touched is not None:
            rows = rows * (torch.rand(rows.shape, generator=own) < self._touched)
        if len(self._shape) == 1:
            return torch.randn(self._shape, generator=own).mul_(rows)
        outputs = torch.randn((_SAMPLES, self._shape[0]), generator=own).mul_(rows)
        inputs = torch.randn((_SAMPLES, self._shape[1]), generator=own).relu_()
        # the mean square of a ReLU's output is a half
        return torch.mm(outputs.mul_(math.sqrt(2 / _SAMPLES)).t(), inputs)
