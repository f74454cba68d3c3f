"""When a step's gradients are averaged, and how often, where the workers update.

Theory of operation. A *round* averages every parameter's gradient once. A step has one round, which
begins in the backward pass that is the step's last as far as earlier steps tell: then every
gradient leaves as soon as autograd has computed it. If another backward pass follows, or the step
is never made, that round's averages are not what the step needs: the round is closed, and another
one begins, in which all gradients leave when the step is made. Loops run as many backward passes on
every rank, so every rank counts the same rounds, whatever parameters its passes have used: the
passes are those of the parameter that had most.
"""

from __future__ import annotations

from foreprop.core.wire import MOST_ROUNDS, ROUND_SHIFT


class Rounds:
    """One session's count of passes and rounds. Not thread-safe: for the training thread."""

    def __init__(self, fixed_passes: int | None = None, *, counts_rounds: bool = False) -> None:
        """``fixed_passes``: backward passes per step as the user says; None: to be learned.

        ``counts_rounds``: collectives know no rounds of a step: each is a step of its own.
        """
        self.serial = 1
        """Of this round, counted from the session's start."""
        self.step = 1
        """Of this round, as servers or collectives count."""
        self._counts_rounds = counts_rounds
        self._again = 0  # rounds of this step before it
        self._fixed = fixed_passes
        self._expected = 0  # passes per step, with those whose gradients are discarded
        self._passes = 0  # of the parameter that had most, since the last step
        self._fewer = 0  # passes of the last step, if it had fewer than expected

    @property
    def flags(self) -> int:
        """For a push's flags: which of the step's rounds this is."""
        return self._again << ROUND_SHIFT

    def note_pass(self, passes: int) -> None:
        """A parameter has had so many passes since the last step."""
        self._passes = max(self._passes, passes)

    @property
    def is_last_pass(self) -> bool:
        """Whether gradients may leave as they become ready."""
        return self._passes == self._expected

    def begin_again(self) -> None:
        """The gradients have changed since they left: another round of the same step."""
        self.serial += 1
        self._again += 1
        self.step += self._counts_rounds
        if self._again == MOST_ROUNDS:  # nobody makes steps: gradients are only read
            self._again = 0
            self.step += not self._counts_rounds

    def end_step(self, discards: int, *, learning: bool) -> None:
        """The step is made. ``discards``: of the passes of the parameter that had most.

        While ``learning`` nothing leaves early, so what the step shows is what the next ones are
        expected to be. Later ones raise that at once, and lower it when two agree.
        """
        self.serial += 1
        self.step += 1
        self._again = 0
        passes, self._passes = self._passes, 0
        if not passes:
            return
        if learning:
            self._expected = (self._fixed or passes - discards) + discards
        elif self._fixed is None:
            self._expect(passes)

    def _expect(self, passes: int) -> None:
        if passes >= self._expected or passes == self._fewer:
            self._expected = passes
        self._fewer = passes
