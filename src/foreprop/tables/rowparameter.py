"""A row-wise parameter: an embedding's table, of which each step needs the rows of its batch.

The servers hold the table. A look-up (``F.embedding``, ``F.embedding_bag``) first fetches the rows
that it wants and that have not been fetched since the last step; any other use fetches all. So the
user sees an ordinary parameter, of which no stale row can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.path.parameter import GET_DATA, SessionState, SynchronisedParameter
from foreprop.path.waiting import is_waiting, make_wait, stop_waiting
from foreprop.tables.exchange import Pull, gradient_rows
from foreprop.tables.lookahead import RowSources, lookahead
from foreprop.tables.rowengine import RowEngine

_LOOK_UPS = frozenset({F.embedding, F.embedding_bag})
_LEARNING_STEPS = 2


class RowParameter(SynchronisedParameter):
    """The life of a table: rows come at their look-up, gradients of rows go after backward."""

    def __init__(
        self,
        index: int,
        name: str,
        parameter: torch.nn.Parameter,
        session: SessionState,
        engine: RowEngine,
    ) -> None:
        super().__init__(index, name, parameter, session)
        self._rows = engine
        self._fresh = torch.full((len(parameter),), -1, dtype=torch.int64)
        """By row: after which step it was fetched."""
        self._whole_step = -1  # after which step all rows were fetched
        self._pulls: list[Pull] = []  # of rows that the next step is expected to need
        self._sources = RowSources()
        self._detached = False

    # Gradients.
    def _check_gradient(self, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.sparse_coo:
            raise ConfigError(
                f"the gradient of {self.name} is dense, and it is held row by row: something else"
                f" than a look-up uses it. Name it in dense_parameters, or give the embedding"
                " sparse=False"
            )

    def read_gradient(self, *, in_place: bool) -> None:
        """Nobody has the ranks' rows together but the servers, and they do not keep them."""
        raise TrainingLoopError(
            f"the gradient of {self.name} is {'edited' if in_place else 'read'}: it is this rank's"
            " rows only, for the table is held row by row. Name it in dense_parameters, or give the"
            " embedding sparse=False; to clip use parallelize(..., clip_grad_norm=...)"
        )

    def _show_held(self) -> None:
        """It shows this rank's own: see `read_gradient`."""

    def _push(self, gradient: torch.Tensor | None, step: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # nothing here is a use
            self._push_rows(gradient, step)

    def _push_rows(self, gradient: torch.Tensor | None, step: int) -> None:
        flags, with_value = self._note_changed_value()
        increment_version(self.parameter)  # whoever saved the old value must not use it
        self._value.version = self.parameter._version
        if with_value:
            self._rows.send_row_values(self.index, step, self.parameter.detach())
        self._pushed_step = step
        self._watched = False
        self._pulls.clear()
        make_wait(self.parameter, self)
        part = None if gradient is None else gradient_rows(gradient.detach().cpu())
        self._rows.push_rows(self.index, step, part, flags=flags)

    # The start.
    def before_offering(self) -> None:
        """Rank 0 has them all."""
        self._whole_step = 0

    def receive_initial_value(self) -> None:
        """Rows come when they are used."""

    # Use.
    def before_use(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        in_place: bool,
    ) -> bool:
        self.check_stepped()
        if self._watched:
            self._session.first_use_begins(self)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _LOOK_UPS:
                self._look_up(args[0] if args else kwargs["input"], kwargs)
            else:
                self.settle_whole()
            stop_waiting(self.parameter)
        if func == GET_DATA:
            self._value.exposed = True
        return True

    def after_use(self, result: Any) -> None:
        if self._watched and self._session.is_first_use(self, result):
            self._watched = False
        stale = self._watched or self._whole_step != self._pushed_step
        if stale and not self._detached and not is_waiting(self.parameter):
            make_wait(self.parameter, self)

    def detach(self) -> None:
        self._detached = True
        super().detach()

    def _look_up(self, wanted: torch.Tensor, options: Mapping[str, Any]) -> None:
        if options.get("max_norm") is not None:
            raise ConfigError(
                f"max_norm is {options['max_norm']} in a look-up of {self.name}, which would change"
                " rows on this rank alone; leave it out, or name the parameter in dense_parameters"
            )
        numbers = torch.unique(wanted.detach().to("cpu", torch.int64))
        if not len(numbers) or numbers[0] < 0 or numbers[-1] >= len(self._fresh):
            return  # torch says what is wrong with them
        if self._session.completed < _LEARNING_STEPS and lookahead.current is not None:
            self._sources.learn(numbers, lookahead.current)
        if self._whole_step == self._pushed_step:
            return
        if self._missing(numbers) is not None:
            self._land_pulls()
        missing = self._missing(numbers)
        if missing is not None:
            self._land(self._rows.pull_rows(self.index, self._pushed_step, missing))

    def _missing(self, numbers: torch.Tensor) -> torch.Tensor | None:
        """Those of the rows that have not been fetched since the last step."""
        missing = numbers[self._fresh[numbers] != self._pushed_step]
        return missing if len(missing) else None

    def _land_pulls(self) -> None:
        while self._pulls:
            self._land(self._pulls.pop())

    def _land(self, pull: Pull) -> None:
        """Wait for rows, and put them into the table."""
        rows = self._rows.wait_for_rows(pull)
        table = self.parameter.data  # whose changes are not the user's: they leave no version
        table[pull.numbers.to(table.device)] = rows.to(table.device)
        self._fresh[pull.numbers] = pull.step

    def prefetch(self) -> None:
        """A step has been made: ask for the rows of the next batch, as far as it is known."""
        numbers = self._sources.numbers_in(lookahead.upcoming, len(self._fresh))
        if len(numbers):
            self._pulls.append(self._rows.pull_rows(self.index, self._pushed_step, numbers))

    def settle(self) -> None:
        """A row waits at its look-up."""

    def settle_whole(self) -> None:
        """Fetch every row that has not been fetched since the last step."""
        if self._whole_step == self._pushed_step or self._session.leaves_rows:
            return
        with torch._C.DisableTorchFunctionSubclass():  # nothing here is a use
            self._land_pulls()
            missing = self._missing(torch.arange(len(self._fresh)))
            if missing is not None:
                self._land(self._rows.pull_rows(self.index, self._pushed_step, missing))
        self._whole_step = self._pushed_step

    def settle_if_stepped(self) -> None:
        """For compiled code, which must see an ordinary parameter."""
        if self._pushed_step <= self._session.completed:
            self.settle_whole()
            if not self._watched:
                stop_waiting(self.parameter)
