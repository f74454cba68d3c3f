"""What happens to gradients between their sum over the ranks and the optimizer (Parallax 3.1).

All of it is applied to the aggregated gradient, where that is, so it means what it means in one
process with the whole batch. The order is fixed: reduce, clip, update.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Reduction = Literal["mean", "sum"]


class Aggregation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all processes of a session must share, see `foreprop.Config`."""

    reduction: Reduction = "mean"
    clip_grad_value: float | None = None
