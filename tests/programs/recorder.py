"""What a program's run was: losses, times of steps, final parameters. The program sees it as
``recorder``, among its builtins."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel


class Enough(BaseException):
    """The program has made as many steps as it was asked for."""


class Recorder:
    """Of one rank."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._models: list[torch.nn.Module] = []
        self._losses: list[float] = []
        self._times: list[float] = []

    def model(self, model: torch.nn.Module) -> None:
        """One whose parameters are compared at the end."""
        self._models.append(model)

    def own_seed(self) -> None:
        """From here on random numbers, and so the synthetic data, are other ones on each rank."""
        seed = 1000 + int(os.environ["RANK"])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def step(self, loss: Any) -> None:
        """After each step of the training loop."""
        self._losses.append(float(loss))
        self._times.append(time.perf_counter())
        if self._steps and len(self._losses) >= self._steps:
            raise Enough

    def parameters(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": parameter.detach().clone()
            for number, model in enumerate(self._models)
            for name, parameter in _bare(model).named_parameters()
        }

    def write(self, folder: Path, rank: int, error: str) -> None:
        found = {} if error else self.parameters()
        digest = hashlib.sha256()
        for tensor in found.values():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        steps = [then - now for now, then in zip(self._times, self._times[1:], strict=False)]
        record = {
            "error": error,
            "losses": self._losses,
            "step_s": steps,
            "digest": digest.hexdigest() if found else "",
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(record))
        if rank == 0 and found:
            torch.save(found, folder / "parameters.pt")


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model
