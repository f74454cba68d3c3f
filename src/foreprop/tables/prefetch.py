"""Rows of the next batch, asked for as soon as a step is made, as far as they are known."""

from __future__ import annotations

import torch

from foreprop.path.managedparameter import SessionState
from foreprop.tables.exchange import Pull, RowExchange
from foreprop.tables.lookahead import RowSources, lookahead

_LEARNING_STEPS = 2


class Prefetch:
    """Of one table: its ``pulls`` have been asked for, and have not been used yet."""

    def __init__(
        self, number: int, rows: int, session: SessionState, exchange: RowExchange
    ) -> None:
        """``number``: by which the engine knows the table, which has so many ``rows``."""
        self.pulls: list[Pull] = []
        self._number = number
        self._rows = rows
        self._session = session
        self._exchange = exchange
        self._sources = RowSources()

    def learn(self, numbers: torch.Tensor) -> None:
        """A look-up wants these rows, ascending: see where in the batch they are."""
        if self._session.completed < _LEARNING_STEPS and lookahead.current is not None:
            self._sources.learn(numbers, lookahead.current)

    def begin(self, step: int) -> None:
        """This step has been made: ask for the rows that the next batch will look up."""
        numbers = self._sources.numbers_in(lookahead.upcoming, self._rows)
        if len(numbers):
            self.pulls.append(self._exchange.pull_rows(self._number, step, numbers))
