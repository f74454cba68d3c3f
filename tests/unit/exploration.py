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
        saved = pickle.dumps(here) if len(choices) > 1 else b""
        for number, choice in enumerate(choices, 1):
            # the last one may happen to the world itself, which nobody needs any more
            there: SomeWorld = pickle.loads(saved) if number < len(choices) else here
            there.happen(choice)
            state = there.state()
            if state not in known:
                known.add(state)
                waiting.append(there)
    return len(known)
