"""What an update makes of a shard's touched rows: by torch's optimizer, and their averages.

Theory of operation. The optimizers for sparse gradients (SGD, Adagrad, SparseAdam) look at the
touched rows alone. So each update is torch's own, of a small parameter that has just those rows,
with their state; what the optimizer's class makes of a parameter without state is how the state of
a row begins. Nothing is as large as the shard but the values and the states themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foreprop.core.manifest import Hyperparameters
from foreprop.errors import ConfigError
from foreprop.path.partoptimizer import begin_optimizer, optimizer_arguments
from foreprop.path.tensors import is_array
from foreprop.tables.table import RowTable, lazy_zeros

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


class RowOptimizer:
    """The optimizer of one shard's rows, with the state of those that have been updated.

    Not thread-safe.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        table: RowTable,
        group: Hyperparameters,
    ) -> None:
        self._cls = cls
        self._group = group
        self._table = table
        self._shape = (table.rows, table.row_elems)
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._made: torch.optim.Optimizer | None = None
        self._begins: dict[str, torch.Tensor] | None = None
        self._arrays: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, Any] = {}  # of the whole shard: "step"
        self._known = lazy_zeros(self._shape[:1], torch.bool)
        """By the row's place in the table, as in the arrays: whether they have its state."""

    def step(
        self,
        numbers: torch.Tensor,
        values: torch.Tensor,
        gradient: torch.Tensor,
        group: Hyperparameters,
    ) -> None:
        """Update ``values``, those of the rows ``numbers``, by their gradient, and keep them.

        Gradients must be disabled.
        """
        parameter = torch.nn.Parameter(values)
        optimizer = self._optimizer_of(parameter, group)
        state = optimizer.state[parameter]
        state.update(self.state_of(numbers))
        parameter.grad = torch.sparse_coo_tensor(
            torch.arange(len(numbers))[None],
            gradient,
            values.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        optimizer.step()
        self._table.put(numbers, values)
        self.put(numbers, state)

    def _optimizer_of(
        self, parameter: torch.nn.Parameter, group: Hyperparameters
    ) -> torch.optim.Optimizer:
        """One that has this parameter, and no state but how that begins."""
        made = self._made
        if made is None or not self._numbers:  # the class makes the state's beginning, if any
            self._made = made = begin_optimizer(self._cls, parameter, group)
        else:
            made.state.clear()
            made.param_groups[0].update({**optimizer_arguments(group), "params": [parameter]})
        return made

    def state_of(self, numbers: torch.Tensor) -> dict[str, Any]:
        """These rows' state, (len(numbers), row_elems) in each array; empty at the start."""
        places = self._table.places(numbers)
        anywhere = places.clamp(min=0)
        known = self._known.index_select(0, anywhere) & (places >= 0)
        found = dict(self._numbers)
        for key, array in self._arrays.items():
            found[key] = array.index_select(0, anywhere)
        if self._arrays and not known.all():
            begins = self._begin()
            for key in self._arrays:
                found[key] = torch.where(known[:, None], found[key], begins[key])
        return found

    def _begin(self) -> dict[str, torch.Tensor]:
        """How a row's state begins; by key, of one row."""
        if self._begins is not None:
            return self._begins
        parameter = torch.nn.Parameter(torch.zeros(1, self._shape[1], dtype=self._table.dtype))
        optimizer = begin_optimizer(self._cls, parameter, self._group)
        state = optimizer.state[parameter]
        self._begins = {
            key: state[key] if key in state else torch.zeros(1, 1, dtype=array.dtype)
            for key, array in self._arrays.items()
        }
        return self._begins

    def put(self, numbers: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace these rows' state, and the shard's numbers."""
        places = self._table.keep(numbers)
        for key, value in state.items():
            if not is_array(value):
                self._numbers[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            if key not in self._arrays:
                self._arrays[key] = lazy_zeros(self._shape, value.dtype)
            array = self._arrays[key]
            array.index_copy_(0, places, value.to(array.dtype))
        if self._arrays:
            self._known.index_fill_(0, places, True)

    @property
    def whole(self) -> dict[str, Any]:
        """The state of all rows."""
        if self._known.all():
            return {**self._numbers, **self._arrays}
        return self.state_of(torch.arange(self._shape[0]))

    def replace(self, state: dict[str, Any]) -> None:
        """Go on from this state of all rows; an empty one is an optimizer's own at its start."""
        self.forget()
        self.put(torch.arange(self._shape[0]), state)


class RowAverages:
    """The moving averages of one shard, beginning with the table's values. Not thread-safe.

    A row that keeps its value for k steps ends with the average ``decay**k * average + (1 -
    decay**k) * value``, whether it is moved in each of these steps or in one go after them. So a
    row is moved when its value is about to change, and for whoever reads. Exact but for rounding: k
    moves in one are rounded once, not k times. Of a row that has not changed since the start
    nothing is kept: its average is its value.
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
