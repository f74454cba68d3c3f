"""Whether a forward pass uses a parameter one step late, and until when.

Theory of operation. In synchronous training a worker waits for the answer to its push of step c
where step c + 1 first uses the parameter. If it does not wait, it uses what it has: the values
after step c - 1. That use is *late*. The answer lands when the parameter's gradient of step c + 1
is ready, which is not pushed before. So a use is never more than one step late, and the values of a
step without late uses are those of synchronous training.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreprop.errors import InternalError


@dataclass(slots=True, eq=False)
class LateUse:
    """The late uses of one worker's parameter. Not thread-safe."""

    is_owed: bool = False
    """An answer that nobody has waited for has still to land."""
    count: int = 0  # steps that have begun with late values

    def begin(self, *, is_answered: bool) -> bool:
        """Note a step's first use; returns whether it is late."""
        if self.is_owed:
            raise InternalError("a parameter would be used two steps late")
        self.is_owed = not is_answered
        self.count += self.is_owed
        return self.is_owed

    def end(self) -> bool:
        """Whether an answer must land before the next gradient is pushed or values are shown."""
        owed, self.is_owed = self.is_owed, False
        return owed
