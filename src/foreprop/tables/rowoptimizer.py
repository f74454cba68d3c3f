"""The optimizer of one shard's rows, with the state of the rows that have been updated.

Theory of operation. The optimizers for sparse gradients (SGD, Adagrad, SparseAdam) look at the
touched rows alone. So each update is torch's own, of a small parameter that has just those rows,
with their state; what the optimizer's class makes of a parameter without state is how the state of
a row begins. Nothing is as large as the shard but the values and the states themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from foreprop.core.manifest import Hyperparameters
from foreprop.path.tensors import is_array
from foreprop.path.updates import optimizer_arguments
from foreprop.tables.table import RowTable, lazy_zeros


class RowOptimizer:
    """Not thread-safe."""

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
        made, arguments = self._made, optimizer_arguments(group)
        if made is None or not self._numbers:  # the class makes the state's beginning, if any
            self._made = made = self._cls([parameter], **arguments)
        else:
            made.state.clear()
            made.param_groups[0].update({**arguments, "params": [parameter]})
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
        optimizer = self._cls([parameter], **optimizer_arguments(self._group))
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
