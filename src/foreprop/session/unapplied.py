"""What is said of settings that nobody would apply."""

from __future__ import annotations

from foreprop.config import Config
from foreprop.errors import ConfigError


def not_applied(asked: str, config: Config, why: str | None) -> ConfigError:
    """Of the setting ``asked``, which servers would apply; ``why`` they do not."""
    because = why or "update is 'workers'"
    instead = {
        "clip_grad_norm": "call torch.nn.utils.clip_grad_norm_ before step()",
        "clip_grad_value": "call torch.nn.utils.clip_grad_value_ before step()",
        "ema": "average the parameters with torch.optim.swa_utils.AveragedModel",
        "scaler": "use the scaler as in a script without foreprop, and leave it out here",
        "compression": "use the exact codec, compression='lossless'",
    }
    value = getattr(config, asked, None)
    given = f"{asked} is {value!r}" if value is not None else f"a {asked} was given"
    return ConfigError(
        f"{given}, which is done where servers update; here the workers do ({because}):"
        f" {instead[asked]}"
    )
