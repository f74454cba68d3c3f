"""What happens to gradients between their sum over the ranks and the optimizer (Parallax 3.1).

All of it is applied to the aggregated gradient, where that is, so it means what it means in one
process with the whole batch. The order is fixed: reduce, clip, update, average.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Reduction = Literal["mean", "sum"]

_CLIP_EPSILON = 1e-6  # torch's


class Aggregation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all processes of a session must share, see `foreprop.Config`."""

    reduction: Reduction = "mean"
    sparse_reduction: Reduction | None = None
    """Of sparse gradients (Parallax's average_sparse); None: the same."""
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    ema: float | None = None
    skip_nonfinite: bool = False
    """Gradients are of a scaled loss; a step in which some are not finite is left out."""

    check_finite: bool = False
    """A rank's gradient that is not finite ends the session, with its name."""

    @property
    def reports_nonfinite(self) -> bool:
        """Whether gradients that are not finite are an error: with a scaler they are normal."""
        return self.check_finite and not self.skip_nonfinite

    def reduction_of(self, *, sparse: bool) -> Reduction:
        """For parameters whose gradients are sparse, or dense."""
        return self.sparse_reduction or self.reduction if sparse else self.reduction

    @property
    def needs_norm(self) -> bool:
        """Whether no update of a step may begin before all its gradients are aggregated."""
        return self.clip_grad_norm is not None or self.skip_nonfinite

    def skips(self, norm: float) -> bool:
        """Whether a step with this global norm is left out."""
        return self.skip_nonfinite and not math.isfinite(norm)

    @property
    def needs_every_parameter(self) -> bool:
        """Whether ranks tell also of parameters that can have no gradient.

        The norm is of all of them, and averages move in every step.
        """
        return self.needs_norm or self.ema is not None

    def coefficient(self, norm: float) -> float:
        """What to multiply gradients of this global norm by, as torch's ``clip_grad_norm_``."""
        if self.clip_grad_norm is None:
            return 1.0
        coefficient = self.clip_grad_norm / (norm + _CLIP_EPSILON)
        return 1.0 if coefficient > 1.0 else coefficient  # not a number stays that
