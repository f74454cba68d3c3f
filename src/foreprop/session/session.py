"""What users call and get: `parallelize` makes a session, and `Session` says what it offers.

`ConnectedSession` is the one of several processes; `session.alone` has that of a world of one.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch

from foreprop.cluster.world import World, current_world, is_alone
from foreprop.config import LOGGER, Config, Preset
from foreprop.errors import ConfigError
from foreprop.hooks.interception import bare_model, bare_optimizer
from foreprop.session.backends import needs_servers
from foreprop.session.training import Training

if TYPE_CHECKING:
    from foreprop.config.typed import Settings
    from foreprop.observe.metrics import Metrics


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


def parallelize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    preset: Preset | None = None,
    config: Config | None = None,
    world: World | None = None,
    scaler: torch.amp.GradScaler | None = None,
    resume: str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> Session:
    """Train ``model`` with ``optimizer`` on all ranks in step; both are changed in place.

    Call it on every rank, after the model is on its device and all parameter groups are there,
    before the first forward pass. Rank 0's parameters, buffers and optimizer state become
    everybody's. Ranks and addresses come from torchrun; started plainly the world is this process,
    and this is plain PyTorch, without servers, unless the model has remote tables.

    Args:
        model: any module; its parameters keep their identity, names and class. Embeddings with
            sparse gradients may be on the meta device: their rows are on the servers only.
        optimizer: any; over (some of) its parameters. Without one gradients are averaged when
            they are read.
        preset: ``p3`` (default), ``slicing``, ``kvstore``, ``wfbp``, ``tensorflow``, ``p3-2019``.
        config: all settings at once, instead of ``preset`` and ``settings``.
        world: who takes part, as with several processes; by default the environment says it.
        scaler: the ``GradScaler`` that scales this optimizer's loss; changed in place, too.
        resume: the folder of `foreprop.checkpoint`, to go on from the newest; it may be empty.
        **settings: single fields of `Config`, over preset and environment.

    Raises:
        ConfigError: what cannot be used; nothing is changed.
        HandshakeError: the ranks do not agree; both sides' values are in the message.
        StepTimeout, PeerLost: another process did not come, or went away.
    """
    if config is not None and (preset is not None or settings):
        raise ConfigError("give either config, or preset and single settings, not both")
    kinds = (torch.nn.Module, torch.optim.Optimizer | None, torch.amp.GradScaler | None)
    if not all(map(isinstance, (model, optimizer, scaler), kinds)):
        from foreprop.session.mistaken import refuse

        refuse(model=model, optimizer=optimizer, scaler=scaler)
    config = config or Config.resolve(preset, **settings)
    if config.plugins is not None:
        from foreprop.config.plugins import load_plugins

        load_plugins(config.plugins)
    alone = config.max_workers is None and (is_alone() if world is None else world.size == 1)
    model = bare_model(model, alone=alone)
    optimizer = bare_optimizer(optimizer)
    lone = world is None and alone and not needs_servers(model, optimizer, config)
    if resume is not None:
        from foreprop.session.resuming import resumed

        return resumed(resume, model, optimizer, config, scaler, world=world, lone=lone)
    if lone:
        from foreprop.session.alone import LoneSession

        return LoneSession(model, optimizer, config, scaler)
    return connect(model, optimizer, config, world=world, scaler=scaler)


def connect(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    *,
    world: World | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> ConnectedSession:
    """With servers, or a ring, in a world of one, too: for what measures them."""
    if config.join is not None:
        from foreprop.config.joinaddress import check_elastic

        check_elastic(config)
    world = world or current_world(config.join_timeout_s, joins=config.join)
    groups = [{"params": model.parameters()}] if optimizer is None else optimizer.param_groups
    if world.rank == 0 and not any(p.requires_grad for group in groups for p in group["params"]):
        from foreprop.session.mistaken import report_idle

        report_idle(model, optimizer)
    session = ConnectedSession(model, optimizer, world, config, scaler)
    if session.rank == 0 and (session.world_size > 1 or config.max_workers):
        LOGGER.info("%s", session.describe())
    return session


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
    def joined_at(self) -> int | None:
        from foreprop.session.newcomer import joined_at

        return joined_at(self._training)

    @property
    def planning(self) -> bool:
        return self._training.planning

    def flush(self) -> None:
        self._training.meet("flush()")
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

    def state_dict(self) -> dict[str, Any]:
        return self._training.checkpoints.state_dict()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._training.checkpoints.load_state_dict(states)

    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        return self._training.checkpoints.rows(name, numbers)

    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        self._training.checkpoints.set_rows(name, numbers, values)

    def save_tables(self, folder: str | os.PathLike[str]) -> None:
        self._training.checkpoints.save_tables(folder)

    def load_tables(self, folder: str | os.PathLike[str]) -> None:
        self._training.checkpoints.load_tables(folder)

    def stats(self) -> dict[str, Any]:
        from foreprop.session.figures import stats_of

        return stats_of(self._training)

    def metrics(self) -> Metrics:
        return self._training.followed().metrics()

    def call_every(self, steps: int, callback: Callable[[Metrics], object]) -> None:
        self._training.followed().call_every(steps, callback)

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
