"""A session's connection to the other ranks: at its start, and anew when a plan asks for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from foreprop.gradients.update import Needs
from foreprop.hooks.interception import claim_parameter
from foreprop.hooks.modelhooks import SharedBuffers
from foreprop.path.parameter import SynchronisedParameter
from foreprop.servers.setup import Setup
from foreprop.session.adopting import SettingsWatch
from foreprop.session.backends import connect_backends, is_served
from foreprop.session.firststep import FirstStep

if TYPE_CHECKING:
    from foreprop.config import Config
    from foreprop.gradients.averaging import Averaging
    from foreprop.observe.trace import TraceRecorder
    from foreprop.path.managedparameter import ManagedParameter
    from foreprop.path.stalereaders import StaleReaders
    from foreprop.session.training import Training
    from foreprop.tables.remote import RemoteTable
    from foreprop.tables.rowparameter import RowParameter
    from foreprop.tables.tables import RemoteTables


def connect(training: Training, row_wise: Collection[str], needs: Needs) -> None:
    """Synchronise the parameters of these names row by row, the others in slices or chunks."""
    user = training.user
    training.completed = 0
    training.parameters, training.tables = [], []
    training.averaging = training.remote = None
    training.first = FirstStep(training, needs)
    setup = _setup(training, row_wise)
    training.backends = backends = connect_backends(setup)
    training.infos, training.every_parameter = setup.infos, backends.every_parameter
    scaled = training.loss_scale is not None
    training.settings = SettingsWatch(
        user.optimizer, backends, parameters=user.optimized, is_scaled=scaled
    )
    training.buffers = SharedBuffers(user.buffers, backends.engines[0], training.world)
    training.publishes_buffers = bool(user.buffers) and training.buffers.publishes
    training.life.connected = True
    try:
        for index, (name, parameter, _) in enumerate(user.named):
            training.parameters.append(_make_parameter(training, index, name, parameter))
        by_rows = [p for p in training.parameters if training.infos[p.index].rows]
        training.tables = cast("list[RowParameter | RemoteTable]", by_rows)
        if any(info.init is not None for info in training.infos):
            training.remote = remote_tables(training)
        backends.start(training.parameters)
        if training.publishes_buffers:
            training.buffers.publish(0)
    except BaseException as error:
        backends.refuse(error)
        raise
    for synchronised in training.parameters:
        synchronised.watch()
        claim_parameter(synchronised.name, synchronised.parameter, training)
    training.first.watch(user.model)


def _make_parameter(
    training: Training, index: int, name: str, parameter: torch.nn.Parameter
) -> ManagedParameter:
    """The parameter of this number, as the session's choice so far has it."""
    info = training.infos[index]
    if info.init is not None:
        from foreprop.tables.remote import RemoteTable

        return RemoteTable(index, name, parameter, training, *training.backends.rows_of(index))
    if info.rows:
        from foreprop.tables.rowparameter import RowParameter

        return RowParameter(index, name, parameter, training, *training.backends.rows_of(index))
    wanted = index < training.user.optimized
    if wanted and training.choice is not None and not training.by_workers:
        return SynchronisedParameter(index, name, parameter, training)
    from foreprop.gradients.averaged import AveragedParameter

    averaging = _averaging_of(training)
    averaged = AveragedParameter(index, name, parameter, training, averaging, wanted=wanted)
    averaging.parameters.append(averaged)
    return averaged


def _averaging_of(training: Training) -> Averaging:
    if training.averaging is None:
        from foreprop.gradients.averaging import Averaging

        training.averaging = Averaging(
            training.user.optimizer,
            training.fixed_passes,
            collectives=not is_served(training.config),
        )
    return training.averaging


def stale_readers_for(config: Config) -> StaleReaders | None:
    if not config.check_stale:
        return None
    from foreprop.path.stalereaders import StaleReaders

    return StaleReaders()


def _setup(training: Training, row_wise: Collection[str]) -> Setup:
    user = training.user
    return Setup(
        world=training.world,
        config=training.config,
        optimizer=user.optimizer,
        parameters=[parameter for _, parameter, _ in user.named],
        infos=list(user.infos(row_wise, by_workers=training.by_workers)),
        frozen=user.frozen,
        buffers=user.buffers,
        memory=training.parameters,
        make_trace=lambda session_id: _make_trace(training, session_id),
        loss_scale=training.loss_scale,
        by_workers=training.by_workers,
    )


def _make_trace(training: Training, session_id: str) -> TraceRecorder | None:
    folder = training.config.trace
    if folder is not None and training.trace is None:
        from foreprop.observe.trace import TraceRecorder, trace_path

        rank = training.world.rank
        path = trace_path(Path(folder), f"worker-{rank}", session_id)
        training.trace = TraceRecorder(path, f"worker {rank}", rank)
    return training.trace


def remote_tables(training: Training) -> RemoteTables:
    """All remote tables; there may be none."""
    from foreprop.tables.tables import RemoteTables

    infos = training.infos
    remote = [table for table in training.tables if infos[table.index].init is not None]
    return RemoteTables(
        cast("list[RemoteTable]", remote),
        training.user.optimizer,
        infos,
        training.board("tables"),
        world=training.world,
        config=training.config,
    )


def reconnect(training: Training, row_wise: Collection[str]) -> None:
    """End the present backend and go on with another one where it was."""
    training.checkpoints.pull_state()
    optimizer = training.user.optimizer
    state = dict(optimizer.state)
    training.flush()
    training.norm_before = training.grad_norm
    has_averages = training.config.ema is not None
    averages = training.checkpoints.ema_state_dict() if has_averages else {}
    training.life.disconnect(None)
    training.life.let_go()
    optimizer.state.clear()
    optimizer.state.update(state)
    training.completed_before += training.completed
    training.user.make_sparse(row_wise)
    connect(training, row_wise, training.first.needs)
    if has_averages:
        training.checkpoints.load_ema_state_dict(averages)
