"""A row-wise parameter: an embedding's table, of which each step needs the rows of its batch.

The servers hold the table. A look-up (``F.embedding``, ``F.embedding_bag``) first fetches the rows
that it wants and that have not been fetched since the last step; any other use fetches all. So the
user sees an ordinary parameter, of which no stale row can be read.

Rows of the next batch are fetched ahead, where `tables.lookahead` knows that batch. In the first
steps each look-up is compared with the integer tensors of the batch at hand; the *paths* of those
that held its row numbers, indices and keys that lead from a batch to a tensor, will tell the next
batch's rows.

A *remote* table is on the meta device, without memory, and only the servers have its rows. A
look-up in it is made in a small table of just the rows that it wants; the sparse gradient's row
numbers are turned back into the table's. Autograd gathers such gradients in a stand-in, a leaf of
the table's shape and of one element's memory, from where they take the way of all row-wise
gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.features.tables.exchange import Pull, RowExchange
from foreprop.features.tables.lookahead import lookahead
from foreprop.params.parameter import Parameter, ParameterArrival
from foreprop.params.servedparameter import GET_DATA, ParameterValue, ServedGradient
from foreprop.params.setup import SessionState
from foreprop.params.waiting import NEEDS_NO_VALUE, make_wait

_Tensor = torch.Tensor
_LOOK_UPS = {f: inspect.signature(f) for f in (F.embedding, F.embedding_bag)}
# What works on the meta device as it does elsewhere.
_WITHOUT_VALUES = NEEDS_NO_VALUE | {
    _Tensor.detach,
    _Tensor.data.__get__,  # type: ignore[attr-defined]
    _Tensor.__repr__,
    _Tensor.__format__,
    _Tensor.__reduce_ex__,
}
_CACHED_ELEMS = 1 << 24

_tables: dict[int, RemoteRows] = {}
_classes: dict[type, type] = {}

Path = tuple[Any, ...]
_LEARNING_STEPS = 2


def _integer_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dtype in (torch.int64, torch.int32):
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _integer_tensors(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _integer_tensors(item, (*path, index))


class Prefetch:
    """Fetches rows of one table ahead of their use; ``pulls`` are those that nobody has used."""

    def __init__(
        self, number: int, rows: int, session: SessionState, exchange: RowExchange
    ) -> None:
        self.pulls: list[Pull] = []
        self._number = number
        self._rows = rows
        self._session = session
        self._exchange = exchange
        self._paths: set[Path] = set()

    def learn(self, numbers: torch.Tensor) -> None:
        """Learn where a batch has the rows of a look-up: its smallest tensor with all of them."""
        if self._session.completed >= _LEARNING_STEPS or lookahead.current is None:
            return
        found = [
            (tensor.numel(), path)
            for path, tensor in _integer_tensors(lookahead.current)
            if bool(torch.isin(numbers, tensor).all())
        ]
        if found:
            self._paths.add(min(found, key=lambda entry: entry[0])[1])

    def begin(self, step: int) -> None:
        """Ask, after a step, for the rows that the next batch will look up."""
        tensors = _integer_tensors(lookahead.upcoming)
        wanted = [t.flatten().to("cpu", torch.int64) for path, t in tensors if path in self._paths]
        if wanted:
            numbers = torch.unique(torch.cat(wanted))
            numbers = numbers[(numbers >= 0) & (numbers < self._rows)]
            if len(numbers):
                self.pulls.append(self._exchange.pull_rows(self._number, step, numbers))


class RowArrival(ParameterArrival):
    """The arrival of a table whose rows come at their look-up, and never as a whole."""

    gradient: ServedGradient

    def __init__(self, owner: Parameter, *, exchange: RowExchange, number: int) -> None:
        super().__init__(owner)
        self.exchange = exchange
        self.number = number  # of the table, in the exchange
        self.row_count = len(owner.parameter)
        self._prefetch = Prefetch(number, self.row_count, owner.session, exchange)

    def prefetch(self) -> None:
        """Ask, after a step, for the rows of the next batch, as far as it is known."""
        self._prefetch.begin(self.gradient.pushed_step)

    def _fetch(self, numbers: torch.Tensor) -> None:
        """Fetch the rows that have not been fetched since the last step."""
        while self._prefetch.pulls and len(self._missing(numbers)):
            self._land(self._prefetch.pulls.pop())
        if len(missing := self._missing(numbers)):
            self._land(self.pull(missing))

    def pull(self, numbers: torch.Tensor) -> Pull:
        return self.exchange.pull_rows(self.number, self.gradient.pushed_step, numbers)

    def _missing(self, numbers: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _land(self, pull: Pull) -> None:
        """Wait for the rows of a pull, and keep them."""
        raise NotImplementedError


class TableRows(RowArrival):
    """The rows of a table for which the worker has memory: the parameter shows them."""

    def __init__(self, owner: Parameter, *, exchange: RowExchange, number: int) -> None:
        super().__init__(owner, exchange=exchange, number=number)
        self._value = ParameterValue(owner)
        self._fetched_step = torch.full((self.row_count,), -1, dtype=torch.int64)  # of each row
        self.is_stale = True  # unless all rows have been fetched since the last step
        self.gradient = ServedGradient(self, owner.parameter, torch.sparse_coo)

    def before_offering(self) -> None:
        self.is_stale = False  # rank 0 has them all

    def receive_initial_value(self) -> None:
        """Wait for rows when they are used; those that were fetched before are out of date."""
        self._prefetch.pulls.clear()
        self._fetched_step.fill_(-1)
        self.is_stale = True
        self._value.version = self.owner.parameter._version
        self.owner.wait()

    # The gradient.
    def check_gradient(self, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.sparse_coo:
            raise ConfigError(
                f"the gradient of {self.owner.name} is dense, and it is held row by row: something"
                " else than a look-up uses it. Name it in dense_parameters, or give the embedding"
                " sparse=False"
            )

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        owner = self.owner
        with torch._C.DisableTorchFunctionSubclass():  # nothing here is a use
            flags, with_value = self._value.begin_update()
            if with_value and self.exchange.are_in_step:
                self.exchange.send_row_values(self.number, step, owner.parameter.detach())
            self.gradient.pushed_step = step
            self.is_stale, owner.watched = True, False
            self._prefetch.pulls.clear()
            make_wait(owner.parameter, owner)
            self.exchange.push_rows(self.number, step, gradient, flags=flags)

    def read_gradient(self, *, in_place: bool) -> None:
        # only the servers have the ranks' rows together, and they do not keep them
        raise TrainingLoopError(
            f"the gradient of {self.owner.name} is {'edited' if in_place else 'read'}: it is this"
            " rank's rows only, for the table is held row by row. Name it in dense_parameters, or"
            " give the embedding sparse=False; to clip use parallelize(..., clip_grad_norm=...)"
        )

    # Use.
    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _LOOK_UPS:
                self._look_up(args[0] if args else kwargs["input"], kwargs)
            else:
                self.settle_whole()
        if func == GET_DATA:
            self._value.exposed = True

    def _look_up(self, wanted: torch.Tensor, options: Mapping[str, Any]) -> None:
        if options.get("max_norm") is not None:
            raise ConfigError(
                f"max_norm is {options['max_norm']} in a look-up of {self.owner.name}, which would"
                " change rows on this rank alone; leave it out, or name the parameter in"
                " dense_parameters"
            )
        numbers = torch.unique(wanted.detach().to("cpu", torch.int64))
        if not len(numbers) or numbers[0] < 0 or numbers[-1] >= self.row_count:
            return  # torch says what is wrong with them
        self._prefetch.learn(numbers)
        if self.is_stale:
            self._fetch(numbers)

    def settle_whole(self) -> None:
        if self.is_stale and not self.owner.session.leaves_rows:
            with torch._C.DisableTorchFunctionSubclass():  # nothing here is a use
                self._fetch(torch.arange(self.row_count))
            self.is_stale = False

    def _missing(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers[self._fetched_step[numbers] != self.gradient.pushed_step]

    def _land(self, pull: Pull) -> None:
        rows = self.exchange.wait_for_rows(pull)
        table = self.owner.parameter.data  # whose changes are not the user's: they leave no version
        table[pull.numbers.to(table.device)] = rows.to(table.device)
        self._fetched_step[pull.numbers] = pull.step


class RemoteGradient(ServedGradient):
    """A gradient that is gathered in the stand-in for a remote table.

    The table itself shows one without memory instead, by which we notice that it is discarded.
    """

    def __init__(self, arrival: RemoteRows, parameter: torch.nn.Parameter) -> None:
        one = torch.zeros((), dtype=parameter.dtype)
        leaf = torch.nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
        self._shown = torch.empty_like(parameter)
        self._shown_version = 0
        super().__init__(arrival, leaf, torch.sparse_coo)

    def added(self, leaf: torch.Tensor) -> None:
        super().added(leaf)
        self._owner.parameter.grad = self._shown
        self._shown_version = self._shown._version

    def before_adding(self) -> None:
        """Drop a gradient that has been discarded, before autograd adds to it."""
        grad = self._owner.parameter.grad
        if grad is not self._shown or self._shown._version != self._shown_version:
            self.leaf.grad = None

    def finish_step(self, step: int) -> None:
        self.before_adding()
        super().finish_step(step)

    def discarded(self, *, dropped: bool) -> None:
        super().discarded(dropped=dropped)
        self.leaf.grad = None


class RemoteRows(RowArrival):
    """The rows of a remote table: each look-up is made in a small table."""

    gradient: RemoteGradient
    waits = False  # only look-ups in it do

    def __init__(self, owner: Parameter, *, exchange: RowExchange, number: int) -> None:
        super().__init__(owner, exchange=exchange, number=number)
        parameter = owner.parameter
        self.row_elems = parameter.shape[1]
        self.gradient = RemoteGradient(self, parameter)
        self.drop_rows()
        _tables[id(parameter)] = self
        cls = type(parameter)
        if cls not in _classes:
            _classes[cls] = type(f"Remote{cls.__name__}", (_Remote, cls), {})
        parameter.__class__ = _classes[cls]

    def detach(self) -> None:
        parameter = self.owner.parameter
        if _tables.pop(id(parameter), None) is not None:
            parameter.__class__ = type(parameter).__mro__[2]
            parameter.grad = None

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        self.gradient.pushed_step = step
        self.owner.watched = False
        self.drop_rows()
        self.exchange.push_rows(self.number, step, gradient)

    # Look-ups.
    def look_up(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The look-up's result, from a small table of the rows that it needs."""
        bound = _LOOK_UPS[function].bind(*args, **kwargs)
        bound.apply_defaults()
        options, name = bound.arguments, self.owner.name
        for option in ("max_norm", "scale_grad_by_freq"):
            if options.get(option):
                raise ConfigError(
                    f"{option} is {options[option]} in a look-up of {name}, whose rows are on the"
                    " servers only: leave it out"
                )
        if options["weight"] is not self.owner.parameter:
            raise ConfigError(
                f"{name}, whose rows are on the servers only, is used as"
                " another argument of a look-up than weight"
            )
        wanted, leaf = options["input"], self.gradient.leaf
        numbers, places = self._numbers_in(wanted)
        self._prefetch.learn(numbers)
        if not len(numbers):
            numbers = torch.zeros(1, dtype=torch.int64)  # torch wants a table that has rows
        leaf.requires_grad_(self.owner.parameter.requires_grad)
        options["input"] = places.to(wanted.device)
        rows = self._rows_of(numbers).to(wanted.device)
        options["weight"] = _make_small_table(leaf, rows, numbers, self.gradient)
        if (padding := options["padding_idx"]) is not None:
            own = (numbers == (padding if padding >= 0 else self.row_count + padding)).nonzero()
            options["padding_idx"] = int(own) if len(own) else None
        options["sparse"] = options.get("mode") != "max"  # for which torch has no sparse gradient
        result = function(*bound.args, **bound.kwargs)
        self.owner.after_use(result)
        return result

    def _numbers_in(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The row numbers, ascending and each once, and the place there of each of ``wanted``."""
        self.gradient.check_stepped()
        numbers, places = torch.unique(wanted.detach().to("cpu", torch.int64), return_inverse=True)
        self.check_numbers(numbers)
        return numbers, places

    def check_numbers(self, numbers: torch.Tensor) -> None:
        if len(numbers) and (numbers[0] < 0 or numbers[-1] >= self.row_count):
            bad = int(numbers[0] if numbers[0] < 0 else numbers[-1])
            raise IndexError(
                f"row {bad} of {self.owner.name} is looked up, which has rows 0 to"
                f" {self.row_count - 1}"
            )

    # Rows.
    def drop_rows(self) -> None:
        """Forget all rows that have been fetched: they are out of date."""
        self._prefetch.pulls.clear()
        self._have = torch.empty(0, dtype=torch.int64)  # fetched since the last step, ascending
        self._fetched = torch.empty(0, self.row_elems, dtype=self.owner.parameter.dtype)

    def rows(self, wanted: torch.Tensor) -> torch.Tensor:
        """A copy of these rows, in any order and also repeated, as they are after the last step."""
        numbers, places = self._numbers_in(wanted)
        return self._rows_of(numbers)[places]

    def _rows_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows with these ascending numbers, without repetition."""
        self._fetch(numbers)
        rows = self._fetched[torch.searchsorted(self._have, numbers)]
        if self._fetched.numel() > _CACHED_ELEMS:  # evaluation may want any number in a step
            self.drop_rows()
        return rows

    def _missing(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers[~torch.isin(numbers, self._have, assume_unique=True)]

    def _land(self, pull: Pull) -> None:
        rows = self.exchange.wait_for_rows(pull)
        have, order = torch.cat([self._have, pull.numbers]).sort()
        is_first = torch.ones(len(have), dtype=torch.bool)
        is_first[1:] = have[1:] != have[:-1]  # a prefetched row may be there already
        self._have = have[is_first]
        self._fetched = torch.cat([self._fetched, rows])[order[is_first]]


class _SmallTable(torch.autograd.Function):
    """A small table of some rows, whose gradient is that of the whole table."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: torch.Tensor,
        rows: torch.Tensor,
        numbers: torch.Tensor,
        gathered: RemoteGradient,
    ) -> torch.Tensor:
        ctx.numbers, ctx.gathered, ctx.shape = numbers, gathered, leaf.shape
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.gathered.before_adding()
        gradient = gradients[0].cpu()
        if gradient.layout == torch.sparse_coo:
            numbers, values = ctx.numbers[gradient._indices()[0]], gradient._values()
        else:
            numbers, values = ctx.numbers, gradient
        whole = torch.sparse_coo_tensor(numbers[None], values, ctx.shape, check_invariants=False)
        return whole, None, None, None


_make_small_table: Callable[..., torch.Tensor] = _SmallTable.apply


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
        name = table.owner.name if table is not None else "a table"
        own = getattr(func, "__qualname__", None) or getattr(func, "__name__", func)
        what = "compiled code" if torch.compiler.is_compiling() else own
        raise ConfigError(
            f"{name} is on the meta device and its rows are on the servers only: {what} cannot use"
            " it. Look rows up with its module, F.embedding or F.embedding_bag, where torch.compile"
            " leaves them (table.forward = torch.compiler.disable(table.forward)), or get them"
            " with session.rows(name, numbers)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        parameter: Any = self  # a copy is an ordinary parameter on the meta device
        with torch._C.DisableTorchFunctionSubclass():
            copied = torch.nn.Parameter(parameter.data.clone(), parameter.requires_grad)
        memo[id(self)] = copied
        return copied


def _tables_in(values: Iterable[Any]) -> Iterator[RemoteRows]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tables_in(value)
        elif id(value) in _tables:
            yield _tables[id(value)]
