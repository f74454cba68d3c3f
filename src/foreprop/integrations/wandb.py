"""Metrics for Weights & Biases."""

from __future__ import annotations

from typing import Any

from foreprop.engine.metrics import Metrics
from foreprop.errors import ConfigError, how_to_install


class WeightsAndBiases:
    """Logs metrics to a run: ``session.call_every(50, WeightsAndBiases())`` after ``wandb.init()``.

    They are drawn over ``foreprop/step``, the session's own count of steps, so that they do not
    disturb the steps of what the program logs itself.

    Args:
        run: what ``wandb.init()`` has returned; by default the one that is active.
        prefix: before the names, as in ``foreprop/step_s``.

    Raises:
        ConfigError: wandb is not installed, or no run is active.
    """

    def __init__(self, run: Any = None, *, prefix: str = "foreprop/") -> None:
        self._run = _active_run() if run is None else run
        self._prefix = prefix
        self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")

    def __call__(self, metrics: Metrics) -> None:
        found = {self._prefix + name: value for name, value in metrics.scalars().items()}
        self._run.log({**found, f"{self._prefix}step": metrics.step})


def _active_run() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"wandb is not installed: {how_to_install('wandb')} ({error})") from error
    if wandb.run is None:
        raise ConfigError("no run of Weights & Biases is active: call wandb.init() before")
    return wandb.run
