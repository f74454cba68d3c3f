"""Moving averages of a table, moved row by row and only when it matters.

Theory of operation. A row that keeps its value for k steps ends with the average ``decay**k *
average + (1 - decay**k) * value``, whether it is moved in each of these steps or in one go after
them. So a row is moved when its value is about to change, and for whoever reads. Exact but for
rounding: k moves in one are rounded once, not k times.
"""

from __future__ import annotations

import torch

from foreprop.engine.aggregation import start_average


class RowAverages:
    """Of one shard, beginning with the table's values. Not thread-safe."""

    def __init__(self, table: torch.Tensor, decay: float) -> None:
        self._table = table.detach()  # the same memory
        self._decay = decay
        self._values = start_average(table)
        self._steps = 0  # that have been made since the start
        self._moved = torch.zeros(len(table), dtype=torch.int64)
        """By row: after which of them its average was moved."""

    def before_change(self, numbers: torch.Tensor | None = None) -> None:
        """The values of these rows, or of all, are about to change: those of now still count."""
        if numbers is None:
            numbers = torch.arange(len(self._moved))
        late = numbers[self._moved[numbers] < self._steps]
        self._values[late] = self._current(late)
        self._moved[late] = self._steps

    def end_step(self) -> None:
        """Averages move by one step, to where the values are now."""
        self._steps += 1

    def current(self) -> torch.Tensor:
        """A copy of all rows' averages after the last step.

        Nothing is moved for it, so reading does not change what the averages will be.
        """
        found = self._values.clone()
        late = (self._moved < self._steps).nonzero()[:, 0]
        found[late] = self._current(late)
        return found

    def _current(self, numbers: torch.Tensor) -> torch.Tensor:
        steps = (self._steps - self._moved[numbers]).to(torch.float64)
        weights = (1 - self._decay**steps).to(self._values.dtype)[:, None]
        return torch.lerp(
            self._values[numbers], self._table[numbers].to(self._values.dtype), weights
        )

    def replace(self, values: torch.Tensor) -> None:
        """Go on from these, as after the last step."""
        self._values.copy_(values)
        self._moved.fill_(self._steps)
