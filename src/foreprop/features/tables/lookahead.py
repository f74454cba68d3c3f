"""The next batch: `shard`'s loaders are read one batch ahead where a session wants to know it.

So its rows are pulled as soon as a step is made (`tables.rowparameter.Prefetch`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any


class Lookahead:
    """The batch at hand and the one after it, of the loader that was used last."""

    def __init__(self) -> None:
        self.users = 0  # how many sessions want to know; without any, nothing is read ahead
        self.current: Any = None
        self.upcoming: Any = None

    def join(self) -> Callable[[], None]:
        """Count one more session that wants to know; returns what ends that."""

        def leave() -> None:
            self.users -= 1

        self.users += 1
        return leave

    def follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, each once its successor is known."""
        if not self.users:
            yield from batches
            return
        for self.current, self.upcoming in itertools.pairwise(itertools.chain(batches, [None])):
            yield self.current
        self.current = self.upcoming = None


lookahead = Lookahead()  # the only one of a process
