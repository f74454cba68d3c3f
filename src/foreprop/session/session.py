"""What users get: a `Session`.

A `ConnectedSession` is one of several processes, or has servers; `session.alone` has that of a
world of one.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foreprop.config import LOGGER, Config
from foreprop.session.training import Training

if TYPE_CHECKING:  # a session that is asked for none does without
    from foreprop.engine.metrics import Metrics


class Session(abc.ABC):
    """One model and optimizer in synchronous data-parallel training. Made by `parallelize`.

    A class without behaviour, and no Protocol, whose ``isinstance`` would ask for values.
    """

    @property
    @abc.abstractmethod
    def config(self) -> Config:
        """The settings, as they are now: ``architecture="auto"`` changes some."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This process's number among those that train."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """How many processes train."""

    @property
    @abc.abstractmethod
    def joined_at(self) -> int | None:
        """The first step of a worker that has joined with ``join``; None from the start on."""

    @property
    @abc.abstractmethod
    def planning(self) -> bool:
        """Whether ``architecture="auto"`` or ``slice_elems="auto"`` is still to be decided."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Wait until parameters show the last `optimizer.step()`; with ``staleness`` all ranks'."""

    @property
    @abc.abstractmethod
    def grad_norm(self) -> float | None:
        """The global 2-norm of the last step's aggregated gradients, before clipping.

        What ``torch.nn.utils.clip_grad_norm_`` returns. Blocks until all ranks' gradients of that
        step are aggregated, so ask late: after the next forward pass it is there. None before the
        first step, and unless ``clip_grad_norm`` is set or a scaler was given.
        """

    @abc.abstractmethod
    def ema_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state dict with the moving averages instead of the parameters.

        Any rank may ask by itself, between steps. The averages are in float32 at least. Needs
        ``ema``; raises `ConfigError` otherwise.
        """

    @abc.abstractmethod
    def load_ema_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `ema_state_dict` gave, on every rank alike; buffers are left alone."""

    @abc.abstractmethod
    def master_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state dict with the parameters in full.

        With ``wire_dtype`` servers keep more of them than the workers see; where there are no
        servers it is just a copy. Any rank may ask by itself, between steps.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """A copy of what lossy codecs have kept back of this rank's gradients. Save every rank's.

        Any rank may ask by itself, between steps.
        """

    @abc.abstractmethod
    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what all ranks' `state_dict` gave, in their order; on every rank."""

    @abc.abstractmethod
    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of some rows of a parameter as they are after the last `optimizer.step()`.

        ``numbers``: integers of any shape, on any device; the result has that shape and the rows'.
        Only these rows are fetched. Any rank may ask by itself, between steps. Raises `IndexError`
        for rows that are not there.
        """

    @abc.abstractmethod
    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Change some rows of a remote table by hand, between steps, on every rank alike.

        ``numbers``: (N,), each once; ``values``: (N, elements per row); rank 0's count. Their
        optimizer state stays. Blocks until the servers have them.
        """

    @abc.abstractmethod
    def save_tables(self, folder: str | os.PathLike[str]) -> None:
        """Write all remote tables into a folder: values, optimizer state and averages, in full.

        Any rank may, by itself, between steps; nobody needs room for a table. Rows that were never
        updated or set take no space: they begin alike again.
        """

    @abc.abstractmethod
    def load_tables(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what `save_tables` wrote, with any number of servers and workers.

        On every rank alike, between steps; rank 0 reads. Raises `ConfigError` on all ranks for
        tables that do not fit, of which nothing is loaded.
        """

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Totals since the start: bytes, frames, seconds waited (by parameter), queue depth.

        ``straggler`` is who holds up the others now (`core.lateness.Straggler`), or None.
        """

    @abc.abstractmethod
    def metrics(self) -> Metrics:
        """What this rank did since the last call: steps, waiting, traffic, the straggler."""

    @abc.abstractmethod
    def call_every(self, steps: int, callback: Callable[[Metrics], object]) -> None:
        """Give ``callback`` the metrics since its last call, after every so many steps."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line: who takes part, how, and over which interface."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what is under way, say goodbye, stop this process's servers. Idempotent.

        Called at exit by itself. Afterwards model and optimizer are ordinary PyTorch again; the
        optimizer's state has stayed with the servers, if there are any: take ``state_dict()``
        before. Returns when all ranks have closed theirs, or at the latest after
        ``step_timeout_s``, with a `StepTimeout` that names who has not; with several sessions the
        last one to be closed waits, for all. Where another error is under way (a ``finally``),
        that stays the one that is raised, with a note of what went wrong here.
        """

    @abc.abstractmethod
    def __enter__(self) -> Session: ...

    @abc.abstractmethod
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


def report_idle(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn if the optimizer, or the model without one, has no parameter that is trained."""
    in_model = any(parameter.requires_grad for parameter in model.parameters())
    groups = [] if optimizer is None else optimizer.param_groups
    trains = in_model and optimizer is None
    if trains or any(p.requires_grad for group in groups for p in group["params"]):
        return
    what = f"the optimizer, {type(optimizer).__name__}," if in_model else type(model).__name__
    LOGGER.warning("nothing is trained: %s has no parameter that requires a gradient", what)


class ConnectedSession(Session):
    """A session of several processes, or of one with servers. See `Session` for what it offers."""

    def __init__(self, training: Training) -> None:
        self._training = training

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
    def joined_at(self) -> int | None:
        first = self._training.composition.first_step
        return None if first is None else self._training.steps_before + first

    @property
    def planning(self) -> bool:
        return self._training.composition.planning

    def flush(self) -> None:
        self._training.composition.meet("flush()")
        self._training.flush()

    @property
    def grad_norm(self) -> float | None:
        return self._training.grad_norm

    def ema_state_dict(self) -> dict[str, Any]:
        return self._training.composition.checkpoints.ema_state_dict()

    def load_ema_state_dict(self, state: Mapping[str, Any]) -> None:
        self._training.composition.checkpoints.load_ema_state_dict(state)

    def master_state_dict(self) -> dict[str, Any]:
        return self._training.composition.checkpoints.master_state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._training.composition.checkpoints.state_dict()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._training.composition.checkpoints.load_state_dict(states)

    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        return self._training.composition.checkpoints.rows(name, numbers)

    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        self._training.composition.checkpoints.tables.set_rows(name, numbers, values)

    def save_tables(self, folder: str | os.PathLike[str]) -> None:
        self._training.composition.checkpoints.tables.save(folder)

    def load_tables(self, folder: str | os.PathLike[str]) -> None:
        self._training.composition.checkpoints.tables.load(folder)

    def stats(self) -> dict[str, Any]:
        return self._training.composition.stats()

    def metrics(self) -> Metrics:
        return self._training.composition.followed().metrics()

    def call_every(self, steps: int, callback: Callable[[Metrics], object]) -> None:
        self._training.composition.followed().call_every(steps, callback)

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
        step = self._training.completed_before + self._training.completed
        return f"<foreprop.Session rank {self.rank} of {self.world_size}, step {step}>"
