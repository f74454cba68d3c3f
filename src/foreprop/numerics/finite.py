"""Gradients that are not finite: whose, of which parameter, in which step (``check_finite``)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from foreprop.core.manifest import Aggregation
from foreprop.errors import TrainingLoopError


def check_finite(
    gradient: torch.Tensor, aggregation: Aggregation, *, whose: str, name: str, step: int
) -> None:
    """Raise `TrainingLoopError` for a gradient with elements that are not finite.

    With a scaler these are normal: the step is left out.
    """
    if not aggregation.reports_nonfinite or is_finite(gradient):
        return
    bad = int((~gradient.isfinite()).sum())
    kind = "NaN" if bool(gradient.isnan().any()) else "infinite"
    raise TrainingLoopError(
        f"{whose}: the gradient of {name} is not finite in step {step}: {bad} of"
        f" {gradient.numel()} elements looked at ({str(gradient.dtype).removeprefix('torch.')}) are"
        f" not, some {kind} (check_finite)"
    )


def finite_check(
    aggregation: Aggregation,
) -> Callable[[torch.Tensor, str, str, int], None] | None:
    """`check_finite` by gradient, whose it is, the parameter's name and the step; None if off."""
    if not aggregation.reports_nonfinite:
        return None

    def check(gradient: torch.Tensor, whose: str, name: str, step: int) -> None:
        check_finite(gradient, aggregation, whose=whose, name=name, step=step)

    return check


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether all elements are; one pass over them if so."""
    if not gradient.numel():
        return True
    wide = torch.promote_types(gradient.dtype, torch.float32)
    # a sum is finite only if all elements are; finite ones may have one that is not
    return math.isfinite(float(gradient.sum(dtype=wide))) or bool(gradient.isfinite().all())
