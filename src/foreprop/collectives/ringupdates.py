"""What becomes of summed gradients: measured for the global norm, clipped, applied or shown."""

from __future__ import annotations

import torch

from foreprop.collectives.gradientsums import GradientSums
from foreprop.collectives.local_update import LocalUpdater
from foreprop.core.manifest import Aggregation
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.wire import Flag
from foreprop.path.tensors import clip, square_sum


class RingUpdates:
    """One rank's. The calls for one parameter follow each other, on any threads."""

    def __init__(
        self, sums: GradientSums, updater: LocalUpdater, aggregation: Aggregation, parameters: int
    ) -> None:
        self._sums = sums
        self._updater = updater
        self._aggregation = aggregation
        self._gradients: list[torch.Tensor | None] = [None] * parameters
        """Measured and not applied yet."""
        self._coefficient = 1.0
        self._skip = False
        """Whether the step whose updates are under way is left out."""

    def use_norm(self, norm: float) -> None:
        """Of all gradients, for the updates that follow."""
        self._coefficient = self._aggregation.coefficient(norm)
        self._skip = self._aggregation.skips(norm)

    def measure(self, parameter: int, step: int) -> SquareSum:
        self._gradients[parameter] = None
        gradient = self._gradients[parameter] = self._sums.maybe_aggregate(parameter, step)
        return ZERO if gradient is None else square_sum(gradient)

    def update(self, parameter: int, step: int) -> None:
        gradient, self._gradients[parameter] = self._gradients[parameter], None
        if not self._aggregation.needs_norm:
            gradient = self._sums.maybe_aggregate(parameter, step)
        if self._sums.flags[parameter] & Flag.GRADIENT:
            if gradient is not None:
                self._updater.show(parameter, gradient)
            return
        if gradient is not None and not self._skip:
            clip(gradient, self._aggregation, self._coefficient)
            self._updater.update(parameter, step, gradient)
        self._updater.end_step(parameter)
