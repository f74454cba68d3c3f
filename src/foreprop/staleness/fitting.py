"""What a session with staleness cannot have, and what it means for an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from foreprop.config import Config
from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.core.manifest import Manifest
    from foreprop.path.memory import Memory

MemoryOf = TypeVar("MemoryOf", bound="Callable[[torch.Tensor], Memory]")


def fit(config: Config, manifest: Manifest, usual: MemoryOf) -> MemoryOf:
    """Where parameters' bytes are to be: where they are ``usual``, or beside them.

    Raises `ConfigError` for tables by rows and scalers, with the way round.
    """
    given = f"staleness is {config.staleness!r}"
    for info in manifest.parameters:
        if info.rows:
            raise ConfigError(
                f"{given}, and {info.name} is a table that servers hold row by row, which all ranks"
                " update together: set dense_parameters to its name, or leave staleness out"
            )
    if manifest.knobs.aggregation.skip_nonfinite:
        raise ConfigError(
            f"{given}, and a scaler was given, which leaves out steps of all ranks together: train"
            " in bfloat16, which needs none, or leave staleness out"
        )
    if config.staleness != "late":
        return usual
    from foreprop.staleness.lateparameter import memory_beside

    return cast("MemoryOf", memory_beside)


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
