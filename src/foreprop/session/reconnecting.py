"""A session that goes on with another backend where it was: other servers, shares or slices."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from foreprop.session.backends import connect

if TYPE_CHECKING:
    from foreprop.session.checkpoints import Values
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
    shown, full = _shown_and_full(training)
    training.checkpoints.forget_start()
    training.life.disconnect(None)
    training.life.let_go()
    optimizer.state.clear()
    optimizer.state.update(state)
    training.completed_before += training.completed
    training.user.make_sparse(row_wise)
    with torch.no_grad():
        for name, parameter, _ in training.user.named:
            if name in full:
                parameter.copy_(full[name])
    connect(training, row_wise)
    if full:
        training.checkpoints.begin_rounded(shown, lambda: (shown, full))
    if has_averages:
        training.checkpoints.load_ema_state_dict(averages)


def _shown_and_full(training: Training) -> tuple[Values, Values]:
    """By parameter, what workers see and what servers have, where that is more."""
    shown: dict[str, torch.Tensor] = {}
    full: dict[str, torch.Tensor] = {}
    if training.config.wire_dtype is None:
        return shown, full
    with torch._C.DisableTorchFunctionSubclass():
        for own, master in zip(training.parameters, training.checkpoints.masters(), strict=True):
            if master is not own.parameter:  # else it is not cast, or nobody has more of it
                shown[own.name] = own.parameter.detach().cpu().clone()
                full[own.name] = master
    return shown, full
