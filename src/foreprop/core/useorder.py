"""Whether the order in which parameters are first used has changed for good."""

from __future__ import annotations

from collections.abc import Sequence

_SAMES = 3
"""Steps that are looked at, and show the same new order, until it is taken over."""


class OrderWatch:
    """Begins with the order that the first step has shown. Not thread-safe.

    A step may use some parameters only: those come first then, and the others keep their order.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._last: tuple[int, ...] = ()
        self._seen = 0

    def observe(self, used: Sequence[int]) -> tuple[int, ...] | None:
        """A step's first uses, each once or more; returns the new order if it is to be taken over.

        An empty one says nothing: something else has used all parameters before.
        """
        seen = tuple(dict.fromkeys(used))
        if not seen:
            return None
        places = set(seen)
        agrees = tuple(each for each in self._order if each in places) == seen
        self._seen = 0 if agrees else self._seen + 1 if seen == self._last else 1
        self._last = seen
        if self._seen < _SAMES:
            return None
        self._order = (*seen, *(each for each in self._order if each not in places))
        self._seen = 0
        return self._order
