"""A session that goes on with another backend where it was: other servers, shares or slices."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from foreprop.session.backends import connect

if TYPE_CHECKING:
    from foreprop.session.training import Training


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
