"""Whether all ranks train on the same batch, as after a `foreprop.shard` that was forgotten."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from foreprop.config import LOGGER

_TIMES = 3
"""So often one array's gradients must have been the same, and no other's different."""


class SameBatch:
    """Compares what several have pushed, until two differ: mostly in the first array of step 1."""

    __slots__ = ("_same", "_where", "_whose", "watching")

    def __init__(self, where: str, whose: str = "ranks") -> None:
        self.watching = True
        """Whether `look` is still to be told."""
        self._where, self._whose = where, whose
        self._same: dict[Hashable, int] = {}

    def look(self, which: Hashable, gradients: Sequence[torch.Tensor], *, many: int) -> None:
        """An array's, by rank or node, of which there are so ``many``; once a step. Warns once."""
        first, *others = gradients
        if not others or not _tells(first):
            return
        if not all(torch.equal(first, other) for other in others):
            self.watching = False
            return
        self._same[which] = times = self._same.get(which, 0) + 1
        if times == _TIMES and self.watching:
            self.watching = False
            LOGGER.warning(
                "%s: the gradients of %d %s were the same in %d steps, as if they trained on the"
                " same batches: foreprop.shard(loader) gives each rank its share",
                self._where,
                many,
                self._whose,
                times,
            )


def _tells(gradient: torch.Tensor) -> bool:
    """Not where all elements are one number: zeros, or what a sum of outputs gives its bias."""
    low, high = gradient.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high) & (low != high))
