"""A session's connection to the other ranks: at its start, and anew when a plan asks for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

from foreprop.gradients.update import Needs
from foreprop.hooks import managed
from foreprop.hooks.buffers import SharedBuffers
from foreprop.servers.backend import Setup
from foreprop.session.adopting import SettingsWatch
from foreprop.session.features import connect_backend, make_parameter
from foreprop.session.firststep import FirstStep

if TYPE_CHECKING:
    from foreprop.observe.trace import TraceRecorder
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
    training.backend = backend = connect_backend(_setup(training, row_wise))
    training.engine = backend.engine
    scaled = training.loss_scale is not None
    training.settings = SettingsWatch(
        user.optimizer, backend, parameters=user.optimized, is_scaled=scaled
    )
    training.buffers = SharedBuffers(user.buffers, backend.engine, training.world)
    training.publishes_buffers = bool(user.buffers) and training.buffers.publishes
    training.life.connected = True
    try:
        for index, (name, parameter, _) in enumerate(user.named):
            training.parameters.append(make_parameter(training, index, name, parameter))
        infos = backend.engine.parameters
        by_rows = [p for p in training.parameters if infos[p.index].rows]
        training.tables = cast("list[RowParameter | RemoteTable]", by_rows)
        if any(info.init is not None for info in infos):
            training.remote = remote_tables(training)
        backend.start(training.parameters)
        if training.publishes_buffers:
            training.buffers.publish(0)
    except BaseException as error:
        backend.refuse(error)
        raise
    for synchronised in training.parameters:
        synchronised.watch()
        managed.claim(synchronised.name, synchronised.parameter, training)
    training.first.watch(user.model)


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

    infos = training.engine.parameters
    remote = [table for table in training.tables if infos[table.index].init is not None]
    return RemoteTables(
        cast("list[RemoteTable]", remote),
        training.user.optimizer,
        training.engine,
        session_id=training.backend.session_id,
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
