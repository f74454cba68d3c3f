"""The arithmetic of `core.aggregation.Aggregation`, in place, alike on servers and ring ranks.

Every operation is element-wise, so no bit depends on where a slice begins.
"""

from __future__ import annotations

import torch

from foreprop.core.aggregation import Aggregation


def finish_sum(total: torch.Tensor, aggregation: Aggregation, *, workers: int) -> None:
    """The ranks' gradients have been added up: make the mean of them, if it is to be that."""
    if workers > 1 and aggregation.reduction == "mean":
        total /= workers


def clip(gradient: torch.Tensor, aggregation: Aggregation) -> None:
    """Clamp the elements, as ``torch.nn.utils.clip_grad_value_`` does."""
    limit = aggregation.clip_grad_value
    if limit is not None:
        gradient.clamp_(-limit, limit)
