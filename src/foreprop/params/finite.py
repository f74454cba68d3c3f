"""Gradients that are not finite: whose, of which parameter, in which step (``check_finite``)."""

from __future__ import annotations

import math

import torch

from foreprop.errors import TrainingLoopError


def check_finite(gradient: torch.Tensor, whose: str, name: str, step: int) -> None:
    """Raise `TrainingLoopError` for a gradient with elements that are not finite.

    With a scaler these are normal: ask `Aggregation.reports_nonfinite` first.
    """
    if is_finite(gradient):
        return
    bad = int((~gradient.isfinite()).sum())
    kind = "NaN" if bool(gradient.isnan().any()) else "infinite"
    raise TrainingLoopError(
        f"{whose}: the gradient of {name} is not finite in step {step}: {bad} of"
        f" {gradient.numel()} elements looked at ({str(gradient.dtype).removeprefix('torch.')}) are"
        f" not, some {kind} (check_finite)"
    )


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether all elements are finite; makes one pass over them if so."""
    if not gradient.numel():
        return True
    wide = torch.promote_types(gradient.dtype, torch.float32)
    # a sum is finite only if all elements are; finite ones may have one that is not
    return math.isfinite(float(gradient.sum(dtype=wide))) or bool(gradient.isfinite().all())
