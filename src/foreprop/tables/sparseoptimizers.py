"""Which optimizers can update a table row by row, and under which settings."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from foreprop.errors import ConfigError

SPARSE_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls for cls in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
}
"""Each leaves rows without a gradient as they are; see `check_row_wise`."""


def check_row_wise(optimizer: torch.optim.Optimizer, group_of: Mapping[str, int]) -> None:
    """Refuse what would move rows without a gradient, or what torch refuses itself.

    ``group_of``: of the parameters with sparse gradients, by name.
    """
    if not group_of:
        return
    cls = type(optimizer)
    which = f"for the sparse gradients of {', '.join(sorted(group_of))}"
    if SPARSE_OPTIMIZERS.get(cls.__name__) is not cls:
        raise ConfigError(
            f"optimizer is {cls.__name__}, which cannot be used {which}: it moves rows that a step"
            f" has not touched. Use one of {', '.join(SPARSE_OPTIMIZERS)}, give these parameters an"
            " optimizer and a parallelize() of their own, or say sparse=False"
        )
    for number in sorted(set(group_of.values())):
        group = optimizer.param_groups[number]
        for name in ("momentum", "weight_decay"):
            if group.get(name):
                raise ConfigError(
                    f"{name} of parameter group {number} is {group[name]}, which cannot be used"
                    f" {which}: it moves rows that a step has not touched. Give them a parameter"
                    f" group with {name}=0, or say sparse=False"
                )
