"""Metrics for TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from foreprop.engine.metrics import Metrics
from foreprop.errors import ConfigError, how_to_install


class TensorBoard:
    """Writes metrics as scalars: ``session.call_every(50, TensorBoard("runs/board"))``.

    Each rank that has one writes a run of its own, so give rank 0 one, or each its own folder.

    Args:
        log_dir: where `torch.utils.tensorboard.SummaryWriter` writes; by default as it does.
        writer: a ``SummaryWriter`` that is there already, instead of a folder; it stays open.
        prefix: before the names, as in ``foreprop/step_s``.

    Raises:
        ConfigError: TensorBoard is not installed, or both a folder and a writer are given.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        writer: Any = None,
        prefix: str = "foreprop/",
    ) -> None:
        if log_dir is not None and writer is not None:
            raise ConfigError(f"log_dir is {log_dir!r} and there is a writer: give one of them")
        self._owns = writer is None
        self._writer = _make_writer(log_dir) if writer is None else writer
        self._prefix = prefix

    def __call__(self, metrics: Metrics) -> None:
        for name, value in metrics.scalars().items():
            self._writer.add_scalar(self._prefix + name, value, metrics.step)

    def close(self) -> None:
        if self._owns:
            self._writer.close()
        else:
            self._writer.flush()


def _make_writer(log_dir: str | os.PathLike[str] | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"TensorBoard is not installed: {how_to_install('tensorboard')} ({error})"
        ) from error
    return SummaryWriter(None if log_dir is None else os.fspath(log_dir))
