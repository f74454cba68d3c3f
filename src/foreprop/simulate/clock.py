"""The simulated clock: what happens when, in a fixed order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from foreprop.errors import InternalError

Action = Callable[[Any], None]


class Clock:
    """Runs actions at their times; of those due at once, in the order in which they were set."""

    __slots__ = ("_due", "_events", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action, Any]] = []
        self._due = 0

    def at(self, time_s: float, action: Action, argument: Any = None) -> None:
        """Call ``action(argument)`` at ``time_s``, which must not be past."""
        self._due += 1
        heapq.heappush(self._events, (time_s, self._due, action, argument))

    def run(self, finished: Callable[[], bool]) -> None:
        """Until ``finished``, which is asked after each event; raises if nothing is left to come.

        What should have happened and cannot is a bug of a state machine or of this simulation.
        """
        events, pop = self._events, heapq.heappop
        while not finished():
            if not events:
                raise InternalError(f"nothing happens any more at {self.now_s:.6f} s: a deadlock")
            self.now_s, _, action, argument = pop(events)
            action(argument)

    @property
    def events(self) -> int:
        """How many have been set so far."""
        return self._due
