"""Who applies the optimizer: the workers, unless something asked for needs servers.

Where workers update, a gradient is DDP's in every step: whatever the loop does with it between
`backward()` and `step()` counts. Servers hold the optimizer's state divided among them, and make
what only they can: updates of ranks in different steps, moving averages, tables held row by row.
The presets of published systems have them, too, where they can apply the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from foreprop.config import Config
from foreprop.path.optimizer import check_groups, hyperparameters, why_not_elementwise


class UpdatePlace(NamedTuple):
    """Where updates are made, and why, for the line that is printed."""

    by_workers: bool
    text: str


def place_updates(
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    found: Mapping[str, str],
    *,
    dense: bool,
    rows: bool,
    collectives: bool,
) -> UpdatePlace:
    """Who updates the parameters that are not tables held row by row, which are servers'.

    ``found``: what `parallelize` has seen, as `check_combinations` is told. ``dense``: whether the
    optimizer has any; ``rows``: whether there are such tables. ``collectives``: each rank's engine
    updates where servers would, but parameter by parameter. Raises `ConfigError` for what cannot be
    done where the updates are to be made.
    """
    because: str | None = None
    if found or not config.is_usual:
        from foreprop.session.features import asked_of_servers, check_by_workers

        because = asked_of_servers(config, found, rows=rows)

    def by_workers(why: str) -> UpdatePlace:
        if because is not None:
            check_by_workers(config, found, why, rows=rows)
        return UpdatePlace(True, f"update=workers: {why}")

    if optimizer is None:
        return by_workers("there is no optimizer, gradients are averaged")
    if not dense:
        return UpdatePlace(False, "update=servers: of tables by rows")
    if config.update == "workers":
        by_workers("update is 'workers'")
        return UpdatePlace(True, "update=workers")
    own = collectives or config.elastic or config.preset == "p3"
    published = None if own else config.preset
    if config.update == "auto" and because is None and published is None:
        return UpdatePlace(True, "update=workers")
    why_not = _why_not_by_engines(optimizer) if collectives else _why_not_served(optimizer)
    if config.update == "servers":
        return UpdatePlace(False, "update=servers")
    if why_not is not None:
        return by_workers(why_not)
    return UpdatePlace(False, f"update=servers: {because or f'as {published} was published'}")


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
