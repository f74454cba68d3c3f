"""A session that goes on with another backend where it was.

It may have other servers, shares or slices, or more parameters (`session.additions`). Values,
optimizer state, averages and residuals take the same way as in a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from foreprop.engine.rendezvous import decode_entry
from foreprop.errors import TrainingLoopError, TransportError
from foreprop.session.additions import listed
from foreprop.session.adopting import watch_buffers
from foreprop.session.checkpoints import Values
from foreprop.session.training import Training


def reconnect(training: Training, row_wise: Collection[str], *, renew: bool = False) -> None:
    """End the present backend and go on with another one where it was.

    ``renew``: with the parameters that there are now, instead of those that there were.
    """
    composition, checkpoints = training.composition, training.composition.checkpoints
    checkpoints.pull_state()
    optimizer = training.user.optimizer
    state = dict(optimizer.state)
    training.flush()
    training.norm_before = training.grad_norm
    has_averages = training.config.ema is not None
    averages = checkpoints.ema_state_dict() if has_averages else {}
    shown, full = _shown_and_full(training)
    residuals = checkpoints.state_dict()["residuals"]
    checkpoints.forget_start()
    view = training.backends.view
    training.life.disconnect(None)
    training.life.let_go()
    optimizer.state.clear()
    optimizer.state.update(state)
    training.completed_before += training.completed
    if renew:
        if composition.uses is not None:
            composition.uses.look_away()
        composition.uses = composition.compiled = None  # they know the parameters that there were
        training.user.renew()
    training.user.make_sparse(row_wise)
    with torch.no_grad():
        for name, parameter, _ in training.user.named:
            if name in full:
                parameter.copy_(full[name])
    planned = composition.planning
    composition.connect(row_wise)
    if view is not None and (now := training.backends.view) is not None:
        now.on_end += view.on_end
    if renew and planned:
        composition.begin_planning()  # of these parameters
    if full:
        checkpoints.begin_rounded(shown, lambda: (shown, full))
    checkpoints.replace_residuals(residuals)
    if has_averages:
        checkpoints.load_ema_state_dict(averages)


_BOARD, _JOINED = "additions", "joined"


class _Joining(NamedTuple):
    step: int
    names: list[str]


def reconnect_with(training: Training, names: Sequence[str]) -> None:
    """All ranks go on with the parameters that there are now, of which these are new.

    Also in the middle of a step: gradients that have not been averaged are averaged afterwards.
    """
    started = time.monotonic()
    step = training.completed_before + training.completed + 1
    if training.averaging is not None:
        training.averaging.end_round()
    what = f"step {training.completed + 1} with {listed(names)} to be trained, too"
    mine = json.dumps(_Joining(training.completed + 1, list(names)))
    for rank, text in enumerate(training.board(_BOARD).exchange(_JOINED, mine, what)):
        theirs = _decode(text)
        if set(theirs.names) != set(names):
            raise _unlike(rank, sorted(set(theirs.names) ^ set(names)))
    used = [id(training.parameters[index].parameter) for index in training.first.use_order]
    rows = {info.name for info in training.infos if info.rows}
    with training.state.quietly():
        reconnect(training, rows, renew=True)
    watch_buffers(training)
    numbers = {id(entry[1]): number for number, entry in enumerate(training.user.named)}
    training.first.use_order = [numbers[identity] for identity in used if identity in numbers]
    training.report(
        f"step {step}: {listed(names)} {'are' if len(names) > 1 else 'is'} trained from now on,"
        f" too; the ranks have connected anew in {time.monotonic() - started:.1f} s"
    )


def raise_if_others_join(training: Training) -> None:
    """Raise `TrainingLoopError` if another rank waits where this one does not come. Any thread."""
    averaging = training.averaging
    left = averaging is not None and any(each.left for each in averaging.gradients)
    board = training.board(_BOARD)
    for rank in range(training.world.size):
        found = None
        with contextlib.suppress(TransportError):  # a lost store is noticed otherwise
            found = board.peek(f"{_JOINED}/{rank}") if rank != training.world.rank else None
        if found is not None:
            theirs = _decode(found)
            if theirs.step <= training.completed + left:
                error = _unlike(rank, theirs.names)
                board.publish_failure(error)  # who waits there hears nothing else
                raise error


def _decode(text: str | bytes) -> _Joining:
    said: _Joining = decode_entry(text, _Joining, "the parameters that a rank trains from now on")
    return said


def _unlike(rank: int, names: Sequence[str]) -> TrainingLoopError:
    return TrainingLoopError(
        f"rank {rank} trains {listed(names)} from now on, and another rank does not: unfreeze and"
        " add parameters on every rank alike"
    )


def _shown_and_full(training: Training) -> tuple[Values, Values]:
    # what workers see and what servers have, by parameter, where that is more
    shown: dict[str, torch.Tensor] = {}
    full: dict[str, torch.Tensor] = {}
    if training.config.wire_dtype is None and not training.config.codecs:
        return shown, full
    with torch._C.DisableTorchFunctionSubclass():
        masters = training.composition.checkpoints.masters()
        for own, master in zip(training.parameters, masters, strict=True):
            if master is not own.parameter:  # else it is not cast, or nobody has more of it
                shown[own.name] = own.parameter.detach().cpu().clone()
                full[own.name] = master
    return shown, full
