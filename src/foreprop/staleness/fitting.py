"""What staleness means for an optimizer."""

from __future__ import annotations

import torch


def describe_effect(optimizer: torch.optim.Optimizer, workers: int) -> str | None:
    """What is not as in synchronous training, and not as large as the gradient's share.

    None for SGD without weight decay, whose updates are as long together.
    """
    is_sgd = type(optimizer) is torch.optim.SGD
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    if is_sgd and not decays:
        return None
    if is_sgd:
        what = "weight_decay acts in each of them"
    else:
        name = type(optimizer).__name__
        what = f"{name}'s updates are not as small as a share of the gradient"
    return (
        f"staleness: each step is {workers} updates, one of each worker's share; {what}: parameters"
        f" may move up to {workers} times as far. See docs/staleness.md"
    )
