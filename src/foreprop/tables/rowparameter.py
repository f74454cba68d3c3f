"""A row-wise parameter: an embedding's table, of which each step needs the rows of its batch.

The servers hold the table. A look-up (``F.embedding``, ``F.embedding_bag``) first fetches the rows
that it wants and that have not been fetched since the last step; any other use fetches all. So the
user sees an ordinary parameter, of which no stale row can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from foreprop.errors import ConfigError, InternalError, TrainingLoopError
from foreprop.link.connection import EMPTY
from foreprop.path.parameter import GET_DATA, FirstUse, ParameterValue
from foreprop.path.servedgradient import ServedGradient
from foreprop.path.waiting import (
    is_waiting,
    make_wait,
    no_answer,
    refuse_to_be_compiled,
    stop_waiting,
)
from foreprop.tables.exchange import Pull, RowExchange
from foreprop.tables.lookahead import Prefetch

if TYPE_CHECKING:
    from foreprop.path.managedparameter import SessionState

_LOOK_UPS = frozenset({F.embedding, F.embedding_bag})


class RowParameter:
    """The life of a table: rows come at their look-up, gradients of rows go after backward."""

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
        self.index = index
        self.name = name
        self.parameter = parameter
        self.counts_rows = False
        self.touched_rows = 0  # of the last gradient's, if they are counted
        self._session = session
        self._rows = rows
        self._number = number
        self._value = ParameterValue(index, parameter, session)
        self._fresh = torch.full((len(parameter),), -1, dtype=torch.int64)
        """By row: after which step it was fetched."""
        self._whole_step = -1  # after which step all rows were fetched
        self._prefetch = Prefetch(number, len(parameter), session, rows)
        self._detached = False
        self._first_use = FirstUse(self, session)
        self._gradient = ServedGradient(self, parameter, session, torch.sparse_coo)
        self.finish_step = self._gradient.finish_step
        self.gradient_discarded = self._gradient.discarded
        self.check_stepped = self._gradient.check_stepped

    # The engine reads and writes rows, but nothing of the whole.
    values = landed = EMPTY

    def take_gradient(self, *_: Any, **__: Any) -> Any:
        raise InternalError(f"{self.name} is not sent or updated as a whole")

    sent_gradient = land_average = take_gradient

    # The start.
    def before_offering(self) -> None:
        """Rank 0 has them all."""
        self._whole_step = 0

    def receive_initial_value(self) -> None:
        """Rows come when they are used."""

    # Its gradient.
    @property
    def left(self) -> bool:
        """Whether the coming step's gradient has been sent."""
        return self._gradient.left

    def check_gradient(self, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.sparse_coo:
            raise ConfigError(
                f"the gradient of {self.name} is dense, and it is held row by row: something else"
                f" than a look-up uses it. Name it in dense_parameters, or give the embedding"
                " sparse=False"
            )

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        """Send its rows, or word that there are none; from now on rows are to be fetched."""
        with torch._C.DisableTorchFunctionSubclass():  # nothing here is a use
            flags, with_value = self._value.begin_update()
            if with_value:
                self._rows.send_row_values(self._number, step, self.parameter.detach())
            self._gradient.pushed_step = step
            self._first_use.watched = False
            self._prefetch.pulls.clear()
            make_wait(self.parameter, self)
            self._rows.push_rows(self._number, step, gradient, flags=flags)

    def prefetch(self) -> None:
        """A step has been made: ask for the rows of the next batch, as far as it is known."""
        self._prefetch.begin(self._gradient.pushed_step)

    def replace_busy_gradient(self) -> None:
        """It was copied when it left."""

    def gradient_follows(self, held: torch.Tensor) -> None:
        """It shows this rank's own: see `read_gradient`."""

    def read_gradient(self, *, in_place: bool) -> None:
        """Nobody has the ranks' rows together but the servers, and they do not keep them."""
        raise TrainingLoopError(
            f"the gradient of {self.name} is {'edited' if in_place else 'read'}: it is this rank's"
            " rows only, for the table is held row by row. Name it in dense_parameters, or give the"
            " embedding sparse=False; to clip use parallelize(..., clip_grad_norm=...)"
        )

    # Use.
    def watch(self) -> None:
        """Report the parameter's next differentiable use to the session, as its first."""
        self._first_use.watched = True
        make_wait(self.parameter, self)

    def unwatch(self) -> None:
        if self._first_use.watched:
            self._first_use.watched = False
            stop_waiting(self.parameter)

    answer = staticmethod(no_answer)
    meets_compiler = staticmethod(refuse_to_be_compiled)

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        self.check_stepped()
        self._first_use.begins()
        with torch._C.DisableTorchFunctionSubclass():
            if func in _LOOK_UPS:
                self._look_up(args[0] if args else kwargs["input"], kwargs)
            else:
                self.settle_whole()
            stop_waiting(self.parameter)
        if func == GET_DATA:
            self._value.mark.exposed = True
        return True

    def after_use(self, result: Any) -> None:
        awaited = self._first_use.is_awaited_after(result)
        stale = awaited or self._whole_step != self._gradient.pushed_step
        if stale and not self._detached and not is_waiting(self.parameter):
            make_wait(self.parameter, self)

    def _look_up(self, wanted: torch.Tensor, options: Mapping[str, Any]) -> None:
        if options.get("max_norm") is not None:
            raise ConfigError(
                f"max_norm is {options['max_norm']} in a look-up of {self.name}, which would change"
                " rows on this rank alone; leave it out, or name the parameter in dense_parameters"
            )
        numbers = torch.unique(wanted.detach().to("cpu", torch.int64))
        if not len(numbers) or numbers[0] < 0 or numbers[-1] >= len(self._fresh):
            return  # torch says what is wrong with them
        self._prefetch.learn(numbers)
        if self._whole_step != self._gradient.pushed_step:
            self._fetch(numbers)

    def _fetch(self, numbers: torch.Tensor) -> None:
        """Have those of the rows that have not been fetched since the last step."""
        if len(self._missing(numbers)):
            while self._prefetch.pulls:
                self._land(self._prefetch.pulls.pop())
        if len(missing := self._missing(numbers)):
            self._land(self._rows.pull_rows(self._number, self._gradient.pushed_step, missing))

    def _missing(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers[self._fresh[numbers] != self._gradient.pushed_step]

    def _land(self, pull: Pull) -> None:
        """Wait for rows, and put them into the table."""
        rows = self._rows.wait_for_rows(pull)
        table = self.parameter.data  # whose changes are not the user's: they leave no version
        table[pull.numbers.to(table.device)] = rows.to(table.device)
        self._fresh[pull.numbers] = pull.step

    def settle(self) -> None:
        """A row waits at its look-up."""

    def settle_whole(self) -> None:
        """Fetch every row that has not been fetched since the last step."""
        if self._whole_step == self._gradient.pushed_step or self._session.leaves_rows:
            return
        with torch._C.DisableTorchFunctionSubclass():  # nothing here is a use
            self._fetch(torch.arange(len(self._fresh)))
        self._whole_step = self._gradient.pushed_step

    def settle_if_stepped(self) -> None:
        """For compiled code, which must see an ordinary parameter."""
        if not self._gradient.left:
            self.settle_whole()
            if not self._first_use.watched:
                stop_waiting(self.parameter)

    def detach(self) -> None:
        """The session is over: the table becomes an ordinary one, whatever is pending."""
        self._detached = True
        self._first_use.watched = False
        if is_waiting(self.parameter):
            stop_waiting(self.parameter)
        self._gradient.detach()
