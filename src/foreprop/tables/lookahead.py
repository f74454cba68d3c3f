"""The next batch's look-ups: its rows are asked for as soon as a step is made, as far as known.

`shard`'s loaders are read one batch ahead. In the first steps each look-up is compared with the
tensors of the batch at hand; those that held its row numbers will tell the next batch's rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # a loader asks no server
    from foreprop.path.managedparameter import SessionState
    from foreprop.tables.exchange import Pull, RowExchange

Path = tuple[Any, ...]
"""How to get from a batch to one of its tensors: indices and keys."""

_LEARNING_STEPS = 2


class Lookahead:
    """The batch at hand and the one after it, of the loader that was used last."""

    def __init__(self) -> None:
        self.users = 0
        """Open sessions that want to know; without any, nothing is read ahead."""
        self.current: Any = None
        self.upcoming: Any = None

    def join(self) -> Callable[[], None]:
        """From now on somebody wants to know; returns what ends that."""
        self.users += 1
        return self._leave

    def _leave(self) -> None:
        self.users -= 1

    def follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, each once its successor is known."""
        if not self.users:
            yield from batches
            return
        for self.current, self.upcoming in itertools.pairwise(itertools.chain(batches, [None])):
            yield self.current
        self.current = self.upcoming = None


lookahead = Lookahead()
"""The process's."""


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
    """Of one table: its ``pulls`` have been asked for, and have not been used yet."""

    def __init__(
        self, number: int, rows: int, session: SessionState, exchange: RowExchange
    ) -> None:
        self.pulls: list[Pull] = []
        self._number = number
        self._rows = rows
        self._session = session
        self._exchange = exchange
        self._paths: set[Path] = set()
        """Where in a batch the table's row numbers are."""

    def learn(self, numbers: torch.Tensor) -> None:
        """A look-up wants these rows; the batch's smallest tensor with all of them counts."""
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
        """This step has been made: ask for the rows that the next batch will look up."""
        tensors = _integer_tensors(lookahead.upcoming)
        wanted = [t.flatten().to("cpu", torch.int64) for path, t in tensors if path in self._paths]
        if wanted:
            numbers = torch.unique(torch.cat(wanted))
            numbers = numbers[(numbers >= 0) & (numbers < self._rows)]
            if len(numbers):
                self.pulls.append(self._exchange.pull_rows(self._number, step, numbers))
