"""Who applies the optimizer: the workers, unless something asked for needs servers.

Where workers update, a gradient is DDP's in every step: whatever the loop does with it between
`backward()` and `step()` counts. Servers hold the optimizer's state divided among them, and make
what only they can: updates of ranks in different steps, moving averages, tables held row by row.
The presets of published systems have them, too, where they can apply the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from foreprop.config import Config
from foreprop.errors import ConfigError
from foreprop.path.optimizer import check_groups, hyperparameters, why_not_elementwise

_ONLY_SERVERS = {
    "ema": "average the parameters with torch.optim.swa_utils.AveragedModel",
    "staleness": "leave it out",
    "elastic": "leave it out",
    "backup_workers": "leave it out",
    "counted_replay": "leave it out",
    "compression": "use the exact codec, compression='lossless'",
}
"""Settings that only servers apply, and what to do where workers update."""
_IN_STEPS = {
    "clip_grad_norm": "call torch.nn.utils.clip_grad_norm_ before step()",
    "clip_grad_value": "call torch.nn.utils.clip_grad_value_ before step()",
    "scaler": "use the scaler as in a script without foreprop, and leave it out here",
}
"""Those that only servers apply to tables held row by row, whose gradients no worker sees."""


class UpdatePlace(NamedTuple):
    """Where updates are made, and why, for the line that is printed."""

    by_workers: bool
    text: str


def place_updates(
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    *,
    scaler: bool,
    dense: bool,
    rows: bool,
    collectives: bool,
) -> UpdatePlace:
    """Who updates the parameters that are not tables held row by row, which are servers'.

    ``dense``: whether the optimizer has any; ``rows``: whether there are such tables.
    ``collectives``: each rank's engine updates where servers would, but parameter by parameter.
    Raises `ConfigError` for what cannot be done where the updates are to be made.
    """
    asked = dict(_asked_of_servers(config, scaler=scaler, rows=rows))
    if optimizer is None:
        asked |= dict(_asked_of_steps(config, scaler=scaler))
        _check_applied(asked, config, "parallelize() was given no optimizer")
        if config.update == "servers":
            raise ConfigError(
                "update is 'servers', but parallelize() was given no optimizer to update with: give"
                " it the optimizer, or set update='workers'"
            )
        return UpdatePlace(True, "update=workers: there is no optimizer, gradients are averaged")
    if not dense:
        return UpdatePlace(False, "update=servers: of tables by rows")
    if config.update == "workers":
        _check_applied(asked, config, "update is 'workers'")
        return UpdatePlace(True, "update=workers")
    published = None if collectives or config.preset == "p3" else config.preset
    if config.update == "auto" and not asked and published is None:
        return UpdatePlace(True, "update=workers")
    why_not = _why_not_by_engines(optimizer) if collectives else _why_not_served(optimizer)
    if config.update == "servers":
        return UpdatePlace(False, "update=servers")
    if why_not is not None:
        _check_applied(asked, config, why_not)
        return UpdatePlace(True, f"update=workers: {why_not}")
    because = _given(next(iter(asked)), config) if asked else f"as {published} was published"
    return UpdatePlace(False, f"update=servers: {because}")


def _asked_of_servers(config: Config, *, scaler: bool, rows: bool) -> Iterator[tuple[str, str]]:
    """The settings that ask for servers, each with what to do where workers update."""
    if rows:
        yield from _asked_of_steps(config, scaler=scaler)
    for name, instead in _ONLY_SERVERS.items():
        value = getattr(config, name)
        if name == "compression" and isinstance(value, str):
            from foreprop.core.codec import may_be_lossy

            value = may_be_lossy(value)
        if value:
            yield name, instead


def _asked_of_steps(config: Config, *, scaler: bool) -> Iterator[tuple[str, str]]:
    """The settings that are part of each step."""
    given = {name for name in _IN_STEPS if getattr(config, name, None) is not None}
    given |= {"scaler"} if scaler else set()
    yield from ((name, instead) for name, instead in _IN_STEPS.items() if name in given)


def _check_applied(asked: dict[str, str], config: Config, why: str) -> None:
    """Raise `ConfigError` for a setting that only servers would apply; ``why`` they do not."""
    for name, instead in asked.items():
        raise ConfigError(
            f"{_given(name, config)}, which is done where servers update; here the workers do"
            f" ({why}): {instead}"
        )


def _given(name: str, config: Config) -> str:
    value = getattr(config, name, None)
    return f"{name} is {value!r}" if value is not None else f"a {name} was given"


def _why_not_served(optimizer: torch.optim.Optimizer) -> str | None:
    reason = why_not_elementwise(optimizer)
    if reason is not None:
        return f"servers cannot apply {type(optimizer).__name__}: {reason}"
    check_groups(optimizer)
    hyperparameters(optimizer)
    return None


def _why_not_by_engines(optimizer: torch.optim.Optimizer) -> str | None:
    from foreprop.gradients.localstep import why_not_alone

    return why_not_alone(optimizer)
