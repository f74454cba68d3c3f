"""A session of several processes, as its user sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.session.contract import Session
from foreprop.session.training import Training


class ConnectedSession(Session):
    """A session of several processes, or of one with servers. See `Session` for what it offers."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        config: Config,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._training = Training(model, optimizer, world, config, scaler)

    @property
    def config(self) -> Config:
        return self._training.config

    @property
    def rank(self) -> int:
        return self._training.world.rank

    @property
    def world_size(self) -> int:
        return self._training.world.size

    @property
    def planning(self) -> bool:
        return self._training.planning

    def flush(self) -> None:
        self._training.flush()

    @property
    def grad_norm(self) -> float | None:
        return self._training.grad_norm

    def ema_state_dict(self) -> dict[str, Any]:
        return self._training.checkpoints.ema_state_dict()

    def load_ema_state_dict(self, state: Mapping[str, Any]) -> None:
        self._training.checkpoints.load_ema_state_dict(state)

    def master_state_dict(self) -> dict[str, Any]:
        return self._training.checkpoints.master_state_dict()

    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        return self._training.checkpoints.rows(name, numbers)

    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        self._training.checkpoints.set_rows(name, numbers, values)

    def save_tables(self, folder: str | os.PathLike[str]) -> None:
        self._training.checkpoints.save_tables(folder)

    def load_tables(self, folder: str | os.PathLike[str]) -> None:
        self._training.checkpoints.load_tables(folder)

    def stats(self) -> dict[str, Any]:
        backends = self._training.backends
        counters = backends.counters
        names = [info.name for info in self._training.infos]
        return {
            "steps": self._steps,
            "pushes": counters.pushes,
            "pushed_bytes": counters.pushed_bytes,
            "replies": counters.replies,
            "reply_bytes": counters.reply_bytes,
            "queue_depth": backends.queue_depth,
            "max_queue_depth": counters.max_queue_depth,
            "waits": counters.waits,
            "waited_s": counters.waited_s,
            "waited_s_by_parameter": {
                names[index]: seconds for index, seconds in counters.waited_s_by_parameter.items()
            },
        }

    @property
    def _steps(self) -> int:
        """Since the start."""
        return self._training.completed_before + self._training.completed

    def describe(self) -> str:
        interface = f" (interface={self.config.interface})" if self.config.interface else ""
        return self._training.backends.describe() + interface

    def close(self) -> None:
        self._training.life.close()

    def __enter__(self) -> ConnectedSession:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._training.life.leave(error)

    def __repr__(self) -> str:
        return f"<foreprop.Session rank {self.rank} of {self.world_size}, step {self._steps}>"
