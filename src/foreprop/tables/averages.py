"""Moving averages of a table, moved row by row and only when it matters.

Theory of operation. A row that keeps its value for k steps ends with the average ``decay**k *
average + (1 - decay**k) * value``, whether it is moved in each of these steps or in one go after
them. So a row is moved when its value is about to change, and for whoever reads. Exact but for
rounding: k moves in one are rounded once, not k times.
"""

from __future__ import annotations

import torch

from foreprop.tables.table import RowTable, lazy_zeros


class RowAverages:
    """Of one shard, beginning with the table's values. Not thread-safe.

    Of a row that has not changed since the start nothing is kept: its average is its value.
    """

    def __init__(self, table: RowTable, decay: float) -> None:
        self._table = table
        self._decay = decay
        self._dtype = torch.promote_types(table.dtype, torch.float32)
        self._values = lazy_zeros((table.rows, table.row_elems), self._dtype)
        self._steps = 0  # that have been made since the start
        self._moved = lazy_zeros((table.rows,), torch.int64)
        """By the row's place: after which of them its average was moved, plus one; 0: never."""

    def before_change(self, numbers: torch.Tensor | None = None) -> None:
        """The values of these rows, or of all, are about to change: those of now still count."""
        if numbers is None:
            numbers = torch.arange(self._table.rows)
        _, moved = self._places(numbers)
        late = numbers[moved <= self._steps]
        self.put(late, self.of(late))

    def end_step(self) -> None:
        """Averages move by one step, to where the values are now."""
        self._steps += 1

    def current(self) -> torch.Tensor:
        """A copy of all rows' averages after the last step."""
        return self.of(torch.arange(self._table.rows))

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of these rows' averages after the last step.

        Nothing is moved for it, so reading does not change what the averages will be.
        """
        values = self._table.take(numbers).to(self._dtype)
        places, moved = self._places(numbers)
        steps = (self._steps + 1 - moved).to(torch.float64)
        weights = (1 - self._decay**steps).to(self._dtype)
        weights[moved == 0] = 1.0
        return torch.lerp(self._values[places], values, weights[:, None])

    def _places(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows' averages are (or anywhere), and when they were moved."""
        places = self._table.places(numbers)
        anywhere = places.clamp(min=0)
        return anywhere, self._moved[anywhere] * (places >= 0)

    def put(self, numbers: torch.Tensor, averages: torch.Tensor) -> None:
        """Go on from these, as after the last step."""
        places = self._table.keep(numbers)
        self._values[places] = averages.to(self._dtype)
        self._moved[places] = self._steps + 1
