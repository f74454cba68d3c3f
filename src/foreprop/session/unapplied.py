"""What is said of steps that nobody has made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.errors import TrainingLoopError

if TYPE_CHECKING:
    from foreprop.session.training import Training


def leave_without_step(training: Training, failure: BaseException | None) -> None:
    """A session ends before its first step: say what that means, and to whoever waits for it.

    ``failure``: why, if it was not closed. Other ranks' first steps wait for this one's.
    """
    if failure is None:
        if not training.stepped:
            training.report(_missing_steps(training))
        failure = TrainingLoopError(
            "the session was closed before its first step, and another rank has begun one: make"
            " equally many steps on all ranks"
        )
    if training.life.connected and not training.first.is_over:
        training.board("priorities").publish_failure(failure)  # on which `firststep` waits


def _missing_steps(training: Training) -> str | None:
    """What to say of a loop that never made a step with the optimizer that was given."""
    averaging = training.averaging
    averaged = [] if averaging is None else averaging.parameters
    if not any(parameter.passes for parameter in averaged):
        return None
    text = "step() of the optimizer that was given to parallelize() was never called"
    if training.first.is_over:
        return f"{text}: gradients were averaged when they were read, with no overlap"
    return f"{text}, and no gradient was read: nothing has been synchronised, ranks may differ"
