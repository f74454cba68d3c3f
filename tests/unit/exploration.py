"""All states of a small world, by whatever order of events."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

SomeWorld = TypeVar("SomeWorld", bound=Any)
"""Has ``state()``, to be compared, and ``happen(choice)``; pickle copies it."""


def explore_states(world: SomeWorld, visit: Callable[[SomeWorld], Sequence[Any]]) -> int:
    """How many there are; ``visit`` looks at each, and returns what may happen then."""
    known, waiting = {world.state()}, [world]
    while waiting:
        here = waiting.pop()
        choices = visit(here)
        saved = pickle.dumps(here) if choices else b""
        for choice in choices:
            there: SomeWorld = pickle.loads(saved)
            there.happen(choice)
            state = there.state()
            if state not in known:
                known.add(state)
                waiting.append(there)
    return len(known)
