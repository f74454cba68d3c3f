"""A shard's rows, in memory that is taken as rows get values of their own, and their updates.

Updates are by torch's optimizer. Those for sparse gradients (SGD, Adagrad, SparseAdam) look at the
touched rows alone. So each update is torch's own, of a small parameter that has just those rows,
with their state; what the optimizer's class makes of a parameter without state is how the state of
a row begins. Nothing is as large as the shard but the values and the states themselves.

The rows of a remote table that have no values of their own are made from their numbers whenever
they are wanted, not drawn one after another. A counter goes through SplitMix64's mixing function
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), and Box and
Muller's transformation makes normal numbers of the bits. Each number depends on its place alone.

What belongs to a row, its value, state and average, lies at its *place*. In an ordinary table that
is its number. In a remote one places are given as rows come, so that rows far apart are neighbours
in memory. Nothing here is thread-safe.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from foreprop.core.manifest import Hyperparameters, RowInit
from foreprop.engine.slicetensors import begin_optimizer, optimizer_arguments
from foreprop.engine.tensors import is_array
from foreprop.errors import ConfigError

Make = Callable[[torch.Tensor], torch.Tensor]
"""Makes rows, by their numbers in the shard, as they begin."""

_MAP_NORESERVE = 0x4000  # Linux's; the kernel is not asked to have memory for all of it
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FREE = -1
_FIRST_SIZE_BITS = 10
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_SCALE = 2.0**-32
_MADE_AT_ONCE_ELEMS = 65_536  # few enough for the cache: what lies between takes eight times more
SPARSE_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls for cls in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
}
"""Each leaves rows without a gradient as they are; see `check_row_wise`."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, of which a page takes memory once it is written to."""
    elems = torch.Size(shape).numel()
    if not elems:
        return torch.zeros(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, elems * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=elems).view(tuple(shape))


class RowTable:
    """Rows by number: all of them, or with ``make`` only those that have been kept."""

    def __init__(
        self, rows: int, row_elems: int, dtype: torch.dtype, make: Make | None = None
    ) -> None:
        self.rows = rows
        self.row_elems = row_elems
        self.dtype = dtype
        self._make = make
        self.forget()

    def forget(self) -> None:
        self._values = lazy_zeros((self.rows, self.row_elems), self.dtype)
        self._index = RowIndex() if self._make is not None else None

    @property
    def whole(self) -> torch.Tensor:
        return self._values

    def places(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows' places, or -1 for a row that is not kept."""
        return numbers if self._index is None else self._index.find(numbers)

    def keep(self, numbers: torch.Tensor) -> torch.Tensor:
        """Keep these rows from now on; returns their places."""
        if self._make is None or self._index is None:
            return numbers
        new = numbers[self._index.find(numbers) < 0]
        places = self._index.add(numbers)
        if len(new):
            self._values.index_copy_(0, self._index.find(new), self._make(new))
        return places

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        places = self.places(numbers)
        kept = places >= 0
        if self._make is None or kept.all():
            return self._values.index_select(0, places)
        found = torch.empty(len(numbers), self.row_elems, dtype=self.dtype)
        found[kept] = self._values.index_select(0, places[kept])
        found[~kept] = self._make(numbers[~kept])
        return found

    def put(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        places = numbers if self._index is None else self._index.add(numbers)
        self._values.index_copy_(0, places, rows)

    def kept_at(self, first: int, limit: int) -> torch.Tensor:
        """The numbers of up to ``limit`` kept rows, from the place ``first`` on; ascending."""
        if self._index is None:
            return torch.arange(first, min(first + limit, self.rows))
        return self._index.numbers_at(first, limit).sort().values


class RowIndex:
    """The places of some of very many rows: a hash table of whole numbers.

    Open addressing with linear probing, for many numbers at once. At most half full; about 50 bytes
    per row that has a place, however far apart the rows are. Places are given in order of arrival,
    from 0 on.
    """

    def __init__(self) -> None:
        self.count = 0
        self._numbers = np.empty(2 ** (_FIRST_SIZE_BITS - 1), np.int64)  # by place
        self._resize(_FIRST_SIZE_BITS)

    def find(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows' places, or -1; int64."""
        wanted: Any = numbers.numpy()
        places = np.full(len(wanted), -1, np.int64)
        pending, at = np.arange(len(wanted)), self._home_of(wanted)
        while len(pending):
            seen = self._keys[at]
            hit = seen == wanted[pending]
            places[pending[hit]] = self._places[at[hit]]
            probing = ~hit & (seen != _FREE)
            pending, at = pending[probing], (at[probing] + 1) & self._mask
        return torch.from_numpy(places)

    def add(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows' places, new ones for those that have none. No number may be there twice."""
        places = self.find(numbers)
        new: Any = numbers[places < 0].numpy()
        if len(new):
            count = self.count + len(new)
            given = np.arange(self.count, count)
            places[places < 0] = torch.from_numpy(given)
            if count > len(self._numbers):
                self._grow(count)
            self._numbers[given] = new
            self.count = count
            self._insert(new, given)
        return places

    def numbers_at(self, first: int, limit: int) -> torch.Tensor:
        return torch.from_numpy(self._numbers[first : min(first + limit, self.count)].copy())

    def _grow(self, count: int) -> None:
        bits = int(count).bit_length()
        larger = np.empty(2**bits, np.int64)
        larger[: self.count] = self._numbers[: self.count]
        self._numbers = larger
        self._resize(bits + 1)
        self._insert(larger[: self.count], np.arange(self.count))

    def _resize(self, bits: int) -> None:
        self._shift, self._mask = np.uint64(64 - bits), 2**bits - 1
        self._keys = np.full(2**bits, _FREE, np.int64)
        self._places = np.empty(2**bits, np.int64)

    def _insert(self, numbers: Any, places: Any) -> None:
        """Insert numbers that the table does not have."""
        at = self._home_of(numbers)
        while len(numbers):
            free = self._keys[at] == _FREE
            self._keys[at[free]] = numbers[free]  # of several for one slot, one gets it
            inserted = self._keys[at] == numbers
            self._places[at[inserted]] = places[inserted]
            rest = ~inserted
            numbers, places, at = numbers[rest], places[rest], (at[rest] + 1) & self._mask

    def _home_of(self, numbers: Any) -> Any:
        return ((numbers.astype(np.uint64) * _GOLDEN) >> self._shift).astype(np.int64)


class RowOptimizer:
    """The optimizer of one shard's rows, with the state of those that have been updated."""

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
        self._made: torch.optim.Optimizer | None = None
        self._initial: dict[str, torch.Tensor] | None = None
        self._numbers: dict[str, Any] = {}  # of the whole shard: "step"
        # by place: rows' states, and whether a row has one
        self._arrays: dict[str, torch.Tensor] = {}
        self._known = lazy_zeros(self._shape[:1], torch.bool)

    def step(
        self,
        numbers: torch.Tensor,
        values: torch.Tensor,
        gradient: torch.Tensor,
        group: Hyperparameters,
    ) -> None:
        """Update ``values``, those of the rows ``numbers``, by their gradient, and keep them.

        No gradients may be recorded.
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
        """An optimizer that has this parameter, in its initial state."""
        made = self._made
        if made is None or not self._numbers:  # the class makes the initial state, if any
            self._made = made = begin_optimizer(self._cls, parameter, group)
        else:
            made.state.clear()
            made.param_groups[0].update({**optimizer_arguments(group), "params": [parameter]})
        return made

    def state_of(self, numbers: torch.Tensor) -> dict[str, Any]:
        """The state of rows, (len(numbers), row_elems) in each array; empty at the start."""
        places = self._table.places(numbers)
        anywhere = places.clamp(min=0)
        known = self._known.index_select(0, anywhere) & (places >= 0)
        found = dict(self._numbers)
        for key, array in self._arrays.items():
            found[key] = array.index_select(0, anywhere)
        if self._arrays and not known.all():
            initial = self._initial_state()
            for key in self._arrays:
                found[key] = torch.where(known[:, None], found[key], initial[key])
        return found

    def _initial_state(self) -> dict[str, torch.Tensor]:
        if self._initial is None:
            parameter = torch.nn.Parameter(torch.zeros(1, self._shape[1], dtype=self._table.dtype))
            optimizer = begin_optimizer(self._cls, parameter, self._group)
            state = optimizer.state[parameter]
            self._initial = {
                key: state[key] if key in state else torch.zeros(1, 1, dtype=array.dtype)
                for key, array in self._arrays.items()
            }
        return self._initial

    def put(self, numbers: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace the state of rows, and the shard's numbers."""
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
        if self._known.all():
            return {**self._numbers, **self._arrays}
        return self.state_of(torch.arange(self._shape[0]))

    def replace(self, state: dict[str, Any]) -> None:
        """Replace the state of all rows; an empty one is an optimizer's at its start."""
        self.forget()
        self.put(torch.arange(self._shape[0]), state)


class RowAverages:
    """The moving averages of one shard, beginning with the table's values.

    A row that keeps its value for k steps ends with the average ``decay**k * average + (1 -
    decay**k) * value``, whether it is moved in each of these steps or in one go after them. So a
    row is moved when its value is about to change, and for whoever reads. Exact but for rounding: k
    moves in one are rounded once, not k times. A row that has not changed since the start has its
    value as its average, and nothing is kept of it.
    """

    def __init__(self, table: RowTable, decay: float) -> None:
        self._table = table
        self._decay = decay
        self._dtype = torch.promote_types(table.dtype, torch.float32)
        self._values = lazy_zeros((table.rows, table.row_elems), self._dtype)
        self._steps = 0  # since the start
        # by place, the step after which a row's average was moved, plus one; 0: never
        self._moved = lazy_zeros((table.rows,), torch.int64)

    def before_change(self, numbers: torch.Tensor | None = None) -> None:
        """Move the averages of rows, or of all, whose values are about to change."""
        if numbers is None:
            numbers = torch.arange(self._table.rows)
        _, moved = self._places(numbers)
        late = numbers[moved <= self._steps]
        self.put(late, self.of(late))

    def end_step(self) -> None:
        """Have averages moved by one step more, towards the present values."""
        self._steps += 1

    def current(self) -> torch.Tensor:
        return self.of(torch.arange(self._table.rows))

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of rows' averages after the last step.

        Nothing is moved for it, so reading does not change what the averages will be.
        """
        values = self._table.take(numbers).to(self._dtype)
        places, moved = self._places(numbers)
        steps = (self._steps + 1 - moved).to(torch.float64)
        weights = (1 - self._decay**steps).to(self._dtype)
        weights[moved == 0] = 1.0
        return torch.lerp(self._values[places], values, weights[:, None])

    def _places(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' places, or 0, and the steps at which they were moved."""
        places = self._table.places(numbers)
        anywhere = places.clamp(min=0)
        return anywhere, self._moved[anywhere] * (places >= 0)

    def put(self, numbers: torch.Tensor, averages: torch.Tensor) -> None:
        places = self._table.keep(numbers)
        self._values[places] = averages.to(self._dtype)
        self._moved[places] = self._steps + 1


# Rows as they begin.
def make_rows(
    init: RowInit, numbers: torch.Tensor, row_elems: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows ``numbers`` (int64, of the whole table) as they begin: (len(numbers), row_elems)."""
    made = torch.empty(len(numbers), row_elems, dtype=dtype)
    at_once = max(1, _MADE_AT_ONCE_ELEMS // max(1, row_elems))
    for some, rows in zip(torch.split(numbers, at_once), torch.split(made, at_once), strict=True):
        rows.copy_(torch.from_numpy(_made_values(init, some.numpy(), row_elems)))
    if init.padding_row is not None:
        made[numbers == init.padding_row] = 0
    return made


def _made_values(init: RowInit, numbers: Any, row_elems: int) -> Any:
    if init.distribution == "constant":
        return np.full((len(numbers), row_elems), init.first)
    bits = _random_bits(init.key, numbers, row_elems)
    high, low = (bits >> _HALF) + 0.5, (bits & _LOW).astype(np.float64)
    if init.distribution == "uniform":
        return init.first + (init.second - init.first) * (high * _SCALE)
    normal = np.sqrt(-2 * np.log(high * _SCALE)) * np.cos(2 * np.pi * (low * _SCALE))
    return init.first + init.second * normal


def _random_bits(key: int, numbers: Any, row_elems: int) -> Any:
    """64 bits for each element of the rows."""
    counters = numbers.astype(np.uint64)[:, None] * np.uint64(row_elems)
    mixed = (counters + np.arange(row_elems, dtype=np.uint64)) * _GOLDEN + np.uint64(key)
    for shift, factor in zip(_SHIFTS, _MIX, strict=False):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> _SHIFTS[-1])


def check_row_wise(optimizer: torch.optim.Optimizer, group_of: Mapping[str, int]) -> None:
    """Refuse an optimizer that would move rows without a gradient, or that torch itself refuses.

    ``group_of`` has the parameter groups of the parameters with sparse gradients, by name.
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
