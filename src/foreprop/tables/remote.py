"""A remote table: an embedding's weight on the meta device, whose rows only the servers have.

Theory of operation. The user's parameter stays on the meta device, without memory. A look-up in it
(``F.embedding``, ``F.embedding_bag``) fetches the rows that it wants, and is made in a small table
of just those; the sparse gradient's row numbers are turned back into the table's. Autograd gathers
such gradients in a stand-in, a leaf of the table's shape and of one element's memory, from where
they take the way of all row-wise gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional as F

from foreprop.core.manifest import RowInit
from foreprop.core.shards import part_rows
from foreprop.errors import ConfigError, InternalError
from foreprop.link.connection import EMPTY
from foreprop.path.parameter import FirstUse
from foreprop.path.servedgradient import ServedGradient
from foreprop.path.sums import start_average
from foreprop.path.waiting import NEEDS_NO_VALUE
from foreprop.tables.exchange import RowExchange
from foreprop.tables.lookahead import Prefetch
from foreprop.tables.parts import VALUES
from foreprop.tables.table import make_rows

if TYPE_CHECKING:
    from foreprop.path.managedparameter import SessionState

_Tensor = torch.Tensor
_LOOK_UPS = {look_up: inspect.signature(look_up) for look_up in (F.embedding, F.embedding_bag)}
_WITHOUT_VALUES = NEEDS_NO_VALUE | {
    _Tensor.detach,
    _Tensor.data.__get__,  # type: ignore[attr-defined]
    _Tensor.__repr__,
    _Tensor.__format__,
    _Tensor.__reduce_ex__,
}
"""What works on the meta device as it does elsewhere."""
_CACHED_ELEMS = 1 << 24
_AT_ONCE_ELEMS = 1 << 22
_ASSIGNED = ("max_norm", "scale_grad_by_freq")

_tables: dict[int, RemoteTable] = {}
_classes: dict[type, type] = {}


class RemoteTable:
    """The life of a table that no worker has."""

    def __init__(
        self,
        index: int,
        name: str,
        parameter: torch.nn.Parameter,
        session: SessionState,
        rows: RowExchange,
        number: int,
    ) -> None:
        """``number``: the table's, where its ``rows`` are."""
        one = torch.zeros((), dtype=parameter.dtype)
        leaf = torch.nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
        self.index = index
        self.name = name
        self.parameter = parameter
        self.counts_rows = False
        self.touched_rows = 0
        self._session = session
        self.exchange = rows
        self.number = number
        self.row_count, self.row_elems = parameter.shape
        self._leaf = leaf
        self._first_use = FirstUse(self, session)
        self._gradient = ServedGradient(
            self, leaf, session, torch.sparse_coo, hook=self._on_gradient
        )
        self._prefetch = Prefetch(number, self.row_count, session, rows)
        self.check_stepped = self._gradient.check_stepped
        self._mark = torch.empty_like(parameter)
        """Shown as the gradient, to notice when somebody discards it: without memory, too."""
        self._mark_version = 0
        self.drop_rows()
        _tables[id(parameter)] = self
        parameter.__class__ = _remote_class(type(parameter))

    def detach(self) -> None:
        """The session is over: an ordinary parameter on the meta device."""
        if _tables.pop(id(self.parameter), None) is not None:
            self.parameter.__class__ = type(self.parameter).__mro__[2]
            self.parameter.grad = None
        self._first_use.watched = False
        self._gradient.detach()

    # Look-ups.
    def look_up(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The function's result, from a small table of the rows that it needs."""
        bound = _LOOK_UPS[function].bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        self._check_options(options)
        self.check_stepped()
        wanted = options["input"]
        numbers, places = torch.unique(wanted.detach().to("cpu", torch.int64), return_inverse=True)
        self.check_numbers(numbers)
        self._prefetch.learn(numbers)
        if not len(numbers):
            numbers = torch.zeros(1, dtype=torch.int64)  # torch wants a table that has rows
        self._leaf.requires_grad_(self.parameter.requires_grad)
        options["input"] = places.to(wanted.device)
        rows = self._rows_of(numbers).to(wanted.device)
        options["weight"] = _take_part(self._leaf, rows, numbers, self)
        options["padding_idx"] = self._place_of_padding(options["padding_idx"], numbers)
        options["sparse"] = options.get("mode") != "max"  # for which torch has no sparse gradient
        self._forget_if_many()
        result = function(*bound.args, **bound.kwargs)
        self._first_use.is_awaited_after(result)
        return result

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name in _ASSIGNED:
            if options.get(name):
                raise ConfigError(
                    f"{name} is {options[name]} in a look-up of {self.name}, whose rows are on the"
                    " servers only: leave it out"
                )
        if options["weight"] is not self.parameter:
            raise ConfigError(
                f"{self.name}, whose rows are on the servers only, is used as"
                " another argument of a look-up than weight"
            )

    def check_numbers(self, numbers: torch.Tensor) -> None:
        if len(numbers) and (numbers[0] < 0 or numbers[-1] >= self.row_count):
            bad = int(numbers[0] if numbers[0] < 0 else numbers[-1])
            raise IndexError(
                f"row {bad} of {self.name} is looked up, which has rows 0 to {self.row_count - 1}"
            )

    def _place_of_padding(self, row: int | None, numbers: torch.Tensor) -> int | None:
        if row is None:
            return None
        place = (numbers == (row if row >= 0 else self.row_count + row)).nonzero()
        return int(place) if len(place) else None

    # Rows.
    def drop_rows(self) -> None:
        """What has been fetched is out of date."""
        self._prefetch.pulls.clear()
        self._have = torch.empty(0, dtype=torch.int64)
        """The rows that have been fetched since the last step, ascending."""
        self._fetched = torch.empty(0, self.row_elems, dtype=self.parameter.dtype)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of these rows as they are after the last step; in any order, also repeated."""
        self.check_stepped()
        found, places = torch.unique(numbers.detach().to("cpu", torch.int64), return_inverse=True)
        self.check_numbers(found)
        rows = self._rows_of(found)[places]
        self._forget_if_many()
        return rows

    def whole(self) -> torch.Tensor:
        """All rows, as they are after the last step."""
        table = torch.empty(self.row_count, self.row_elems, dtype=self.parameter.dtype)
        for numbers in self._in_parts():
            table[numbers] = self._fetch(numbers)
        return table

    def whole_of(self, entry: str) -> torch.Tensor:
        """All rows' averages, or values in full (`tables.parts`)."""
        init = cast("RowInit", self._session.infos[self.index].init)
        dtype = self.parameter.dtype
        table = torch.empty(self.row_count, self.row_elems, dtype=dtype)
        for numbers in self._in_parts():
            table[numbers] = make_rows(init, numbers, self.row_elems, dtype)
        if entry != VALUES:
            table = start_average(table)
        self.exchange.settle_rows()
        for part in self.exchange.kept_rows(self.number):
            table[part.numbers] = part.entries.get(entry, part.entries[VALUES]).to(table.dtype)
        return table

    def _in_parts(self) -> Iterator[torch.Tensor]:
        """All row numbers, not too many at once."""
        at_once = part_rows(self.row_elems, _AT_ONCE_ELEMS)
        for start in range(0, self.row_count, at_once):
            yield torch.arange(start, min(start + at_once, self.row_count))

    def _rows_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """By ascending numbers without repetition."""
        while self._prefetch.pulls and len(self._missing(numbers)):
            pull = self._prefetch.pulls.pop()
            self._remember(pull.numbers, self.exchange.wait_for_rows(pull))
        missing = self._missing(numbers)
        if len(missing):
            self._remember(missing, self._fetch(missing))
        return self._fetched[torch.searchsorted(self._have, numbers)]

    def _missing(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers[~torch.isin(numbers, self._have, assume_unique=True)]

    def _fetch(self, numbers: torch.Tensor) -> torch.Tensor:
        pull = self.exchange.pull_rows(self.number, self._gradient.pushed_step, numbers)
        return self.exchange.wait_for_rows(pull)

    def _remember(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        have, order = torch.cat([self._have, numbers]).sort()
        fresh = torch.ones(len(have), dtype=torch.bool)
        fresh[1:] = have[1:] != have[:-1]  # a prefetched row may be there already
        self._have = have[fresh]
        self._fetched = torch.cat([self._fetched, rows])[order[fresh]]

    def _forget_if_many(self) -> None:
        """Evaluation may look up any number of rows between two steps."""
        if self._fetched.numel() > _CACHED_ELEMS:
            self.drop_rows()

    def prefetch(self) -> None:
        """A step has been made: ask for the rows of the next batch, as far as it is known."""
        self._prefetch.begin(self._gradient.pushed_step)

    # Gradients.
    def _on_gradient(self, leaf: torch.Tensor) -> None:
        self._gradient.added(leaf)
        self.parameter.grad = self._mark
        self._mark_version = self._mark._version

    def before_gradient(self) -> None:
        """Autograd is about to add to the gradient: not to one that has been discarded."""
        shown = self.parameter.grad
        if shown is not self._mark or self._mark._version != self._mark_version:
            self._leaf.grad = None

    @property
    def left(self) -> bool:
        """Whether the coming step's gradient has been sent."""
        return self._gradient.left

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        """Send its rows, or word that there are none."""
        self._gradient.pushed_step = step
        self._first_use.watched = False
        self.drop_rows()
        self.exchange.push_rows(self.number, step, gradient)

    def finish_step(self, step: int) -> None:
        """`optimizer.step()`: push what has not been pushed; check what has."""
        self.before_gradient()
        self._gradient.finish_step(step)

    def gradient_discarded(self, *, dropped: bool) -> None:
        self._gradient.discarded(dropped=dropped)
        self._leaf.grad = None

    def replace_busy_gradient(self) -> None:
        """What is shown has no elements to be set to zero."""

    def gradient_follows(self, held: torch.Tensor) -> None:
        """Nobody can hold the stand-in's gradient."""

    # The engine finds nothing to read or write here, and nobody can use the stand-in's gradient.
    values = landed = EMPTY

    def take_gradient(self, *_: Any, **__: Any) -> Any:
        raise InternalError(f"{self.name} is used as if it were here, not on the servers")

    sent_gradient = land_average = check_gradient = read_gradient = take_gradient

    def before_offering(self) -> None:
        """Rank 0 has no values either: rows begin on the servers (`tables.table`)."""

    def receive_initial_value(self) -> None:
        """Rows come when they are looked up."""

    # The parameter never waits, only look-ups in it do.
    def watch(self) -> None:
        """Report the next look-up to the session, as the first use."""
        self._first_use.watched = True

    def unwatch(self) -> None:
        self._first_use.watched = False

    def settle(self) -> None:
        """A row waits at its look-up."""

    def settle_whole(self) -> None:
        """No worker has all rows."""

    def settle_if_stepped(self) -> None:
        """Compiled code cannot use a remote table."""


class _Rows(torch.autograd.Function):
    """A small table of some rows, whose gradient is that of the whole one."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, rows: torch.Tensor, numbers: torch.Tensor, table: RemoteTable
    ) -> torch.Tensor:
        ctx.numbers, ctx.table, ctx.shape = numbers, table, leaf.shape
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.table.before_gradient()
        gradient = gradients[0].cpu()
        if gradient.layout == torch.sparse_coo:
            numbers, values = ctx.numbers[gradient._indices()[0]], gradient._values()
        else:
            numbers, values = ctx.numbers, gradient
        whole = torch.sparse_coo_tensor(numbers[None], values, ctx.shape, check_invariants=False)
        return whole, None, None, None


_take_part: Callable[..., torch.Tensor] = _Rows.apply


class _Remote:
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _Tensor.copy_ and args[1].is_meta:  # load_state_dict() of what has no values
            return args[0]
        table = next(_tables_in((*args, *kwargs.values())), None)
        if func in _LOOK_UPS and table is not None and not torch.compiler.is_compiling():
            return table.look_up(func, args, kwargs)
        name = table.name if table is not None else "a table"
        what = "compiled code" if torch.compiler.is_compiling() else _name_of(func)
        raise ConfigError(
            f"{name} is on the meta device and its rows are on the servers only: {what} cannot use"
            " it. Look rows up with its module, F.embedding or F.embedding_bag, where torch.compile"
            " leaves them (table.forward = torch.compiler.disable(table.forward)), or get them"
            " with session.rows(name, numbers)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy is an ordinary parameter on the meta device."""
        parameter: Any = self
        with torch._C.DisableTorchFunctionSubclass():
            copied = torch.nn.Parameter(parameter.data.clone(), parameter.requires_grad)
        memo[id(self)] = copied
        return copied


def _remote_class(cls: type) -> type:
    if cls not in _classes:
        _classes[cls] = type(f"Remote{cls.__name__}", (_Remote, cls), {})
    return _classes[cls]


def _tables_in(values: Iterable[Any]) -> Iterator[RemoteTable]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tables_in(value)
        elif id(value) in _tables:
            yield _tables[id(value)]


def _name_of(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))
