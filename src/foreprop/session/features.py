"""What does not go together with some settings, and what only servers do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from foreprop.config import Config
from foreprop.config.combinations import FEATURES, asked_for, check_combinations, refused_with
from foreprop.core.codec import kind_of
from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.session.training import Training

_OF_DIFFERENCES = {"1bit", "efsign"}
"""Docs/compression.md has the accuracy of both ways."""
_IN_STEPS = {"clip norm", "clip value", "ema", "scaler"}
"""What only servers do with tables held row by row, whose gradients no worker sees."""


def checked_features(
    training: Training, optimizer: torch.optim.Optimizer | None
) -> Mapping[str, str]:
    """By name what the session has of them, and what to say of each; raises `ConfigError`."""
    found = dict(_features(training, optimizer))
    check_combinations(training.config, found)
    _check_number_of_workers(training.config, training.world.size)
    return found


def _check_number_of_workers(config: Config, workers: int) -> None:
    if config.max_workers is not None and config.max_workers < workers:
        raise ConfigError(
            f"max_workers is {config.max_workers}, and there are {workers} workers at the start:"
            " give at least as many, or leave it out"
        )
    if config.backup_workers >= workers:
        raise ConfigError(
            f"backup_workers is {config.backup_workers}, and must be below the number of workers,"
            f" {workers}: somebody has to count"
        )


def _features(
    training: Training, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, str]]:
    if optimizer is None:
        yield "no optimizer", "parallelize() was given no optimizer"
    if training.has_scaler:
        yield "scaler", "a scaler was given"
    if training.user.row_wise:
        names = ", ".join(sorted(training.user.row_wise))
        yield "tables", f"tables are held row by row ({names})"
    for device in {parameter.device for parameter in training.user.model.parameters()}:
        if device.type not in ("cpu", "meta"):
            yield "device", f"a parameter is on {device}"


def asked_of_servers(config: Config, found: Mapping[str, str], *, rows: bool) -> str | None:
    """The first thing that is asked for and that only servers do; ``rows``: there are tables."""
    asked = {name: FEATURES[name].text(config) for name in asked_for(config)} | dict(found)
    only_servers = refused_with("workers") | (_IN_STEPS if rows else set())
    told = next((text for name, text in asked.items() if name in only_servers), None)
    return told or _maybe_trains_better(config)


def _maybe_trains_better(config: Config) -> str | None:
    """A codec that loses much more of averages than of differences of values."""
    kinds = {kind_of(codec) for _, codec in config.codecs}
    if config.elastic or config.update != "auto" or not kinds & _OF_DIFFERENCES:
        return None
    return f"compression is {config.compression!r}, which loses less of what servers update"


def check_by_workers(config: Config, found: Mapping[str, str], why: str, *, rows: bool) -> None:
    """Raises `ConfigError` for what only servers would do; ``why`` the workers update."""
    here = f"the workers update ({why})"
    tables = {"tables beside workers": f"{here}, but not tables"} if rows else {}
    check_combinations(config, {**found, "workers": here, **tables})
