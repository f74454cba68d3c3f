"""What is said of settings that nobody would apply, and of steps that nobody has made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.config import Config
from foreprop.errors import ConfigError, TrainingLoopError

if TYPE_CHECKING:
    from foreprop.session.training import Training


AWAITED_BOARDS = ("priorities", "update")
"""On which `firststep` waits for other ranks."""


def not_applied(asked: str, config: Config, why: str | None) -> ConfigError:
    """Of the setting ``asked``, which servers would apply; ``why`` they do not."""
    because = why or "update is 'workers'"
    instead = {
        "clip_grad_norm": "call torch.nn.utils.clip_grad_norm_ before step()",
        "clip_grad_value": "call torch.nn.utils.clip_grad_value_ before step()",
        "ema": "average the parameters with torch.optim.swa_utils.AveragedModel",
        "scaler": "use the scaler as in a script without foreprop, and leave it out here",
        "staleness": "leave it out",
        "elastic": "leave it out",
        "backup_workers": "leave it out",
        "counted_replay": "leave it out",
        "compression": "use the exact codec, compression='lossless'",
    }
    value = getattr(config, asked, None)
    given = f"{asked} is {value!r}" if value is not None else f"a {asked} was given"
    return ConfigError(
        f"{given}, which is done where servers update; here the workers do ({because}):"
        f" {instead[asked]}"
    )


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
        for name in AWAITED_BOARDS:
            training.board(name).publish_failure(failure)


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
