"""Whether a forward pass uses a parameter one step late, and until when.

Theory of operation. A worker of synchronous steps waits for the answer to its push of step c where
step c + 1 first uses the parameter. If it does not, it uses what it has: the values after step
c - 1. That use is *late*. The answer lands when the parameter's gradient of step c + 1 is ready,
which is not pushed before. So a use is never more than one step late, and the values of a step
without late uses are those of synchronous training.
"""

from __future__ import annotations

from foreprop.errors import InternalError


class LateUse:
    """Of one parameter of one worker. Not thread-safe."""

    def __init__(self) -> None:
        self.is_owed = False
        """An answer has still to land, for whose values nobody has waited."""
        self.count = 0
        """How many steps have begun with values that were late."""

    def begin(self, *, is_answered: bool) -> bool:
        """A step's first use; whether it is late."""
        if self.is_owed:
            raise InternalError("a parameter would be used two steps late")
        self.is_owed = not is_answered
        self.count += self.is_owed
        return self.is_owed

    def end(self) -> bool:
        """Before its next gradient is pushed, or its values are shown: whether to wait and land."""
        owed, self.is_owed = self.is_owed, False
        return owed
