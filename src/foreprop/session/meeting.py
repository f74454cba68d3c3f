"""Where ranks that may be apart come together: at `flush()` and `close()`, which all call.

With staleness, or with backup workers, who may be behind.

Each waits until all have come, and its own updates are in; then all read the same values again, and
rank 0's buffers; and nobody goes on before all have. Between meetings each rank's buffers are its
own: a rank cannot wait for those of a step that another one has not made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from foreprop.cluster.entries import decode_entry
from foreprop.core.frames import LAST_PRIORITY
from foreprop.core.wire import Kind
from foreprop.errors import TrainingLoopError
from foreprop.path.worker import WorkerEngine
from foreprop.servers.served import ServedBackend

if TYPE_CHECKING:
    from foreprop.session.training import Training


def meet(training: Training, where: str) -> None:
    """All ranks show the same values when this returns: those with all updates so far.

    ``where``: what the user calls, on every rank. Raises `TrainingLoopError` where ranks call
    different things, or are further apart than they may be; `StepTimeout` if one does not come.
    Training thread.
    """
    if training.config.staleness == "late":
        return  # ranks are in the same step
    training.life.meetings = number = training.life.meetings + 1
    board = training.board(f"meeting/{number}")
    what = f"{where}, which all ranks call together with {_setting_of(training)}"
    said = board.exchange("come", json.dumps([where, training.completed]), what)
    if number > 1:
        before = training.board(f"meeting/{number - 1}")
        for name in ("come", "settled", "read"):
            before.forget(f"{name}/{training.world.rank}")
    _check(training, [decode_entry(text, tuple[str, int], what) for text in said])
    training.settle_all()
    board.exchange("settled", "", f"updates before {where}")
    _read_again(training)
    if training.user.buffers:
        if training.buffers.publishes:
            training.buffers.publish(number)
        elif training.world.rank:
            training.buffers.fetch(number)
    board.exchange("read", "", f"parameters after {where}")


def _check(training: Training, said: Sequence[tuple[str, int]]) -> None:
    first, steps = said[0][0], [step for _, step in said]
    for rank, (where, _) in enumerate(said):
        if where != first:
            raise TrainingLoopError(
                f"rank {rank} has called {where} and rank 0 {first}: with {_setting_of(training)}"
                " all ranks call flush() and close() equally often, in the same order"
            )
    staleness = training.config.staleness
    if isinstance(staleness, int) and max(steps) - min(steps) > staleness:
        ahead, behind = steps.index(max(steps)), steps.index(min(steps))
        raise TrainingLoopError(
            f"{first}: rank {ahead} has made {max(steps)} steps and rank {behind} {min(steps)};"
            f" with {_setting_of(training)} they may be {staleness} apart: make as many on all"
            " ranks"
        )


def _setting_of(training: Training) -> str:
    """Why ranks may be in different steps, for messages."""
    backups, staleness = training.config.backup_workers, training.config.staleness
    return f"backup_workers={backups}" if backups else f"staleness={staleness}"


def _read_again(training: Training) -> None:
    """Have the servers send all values as they are now."""
    for engine in training.backends.engines:
        if not isinstance(engine, WorkerEngine):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in training.parameters:
                increment_version(parameter.parameter)
        engine.await_values()
        for piece in engine.slices:
            engine.send_message(piece.server, Kind.PULL, 0, LAST_PRIORITY, b"", slice_=piece.number)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for parameter in training.parameters:
            parameter.receive_initial_value()


def keep_own_buffers(training: Training) -> None:
    """From the start to the first meeting, and between meetings."""
    training.publishes_buffers = False
    training.buffers.keep_own()


def _watch_forward(training: Training) -> None:
    from foreprop.staleness.lateparameter import ForwardPass, LateParameter

    forward = ForwardPass(training.user.model)
    training.life.add_undo(forward.forget)
    for parameter in training.parameters:
        if isinstance(parameter, LateParameter):
            parameter.forward = forward


def begin(training: Training) -> None:
    """Each rank's buffers are its own; say once what staleness means for the optimizer."""
    if training.config.counts_some:
        keep_own_buffers(training)
        if training.config.elastic:
            from foreprop.session.newcomer import begin_elastic

            begin_elastic(training)
        return
    if training.config.staleness == "late":
        _watch_forward(training)
        return
    backend = training.backends.all[0]
    if isinstance(backend, ServedBackend) and training.world.size > 1:
        training.report(_describe_effect(training.user.optimizer, training.world.size))
    keep_own_buffers(training)


def _describe_effect(optimizer: torch.optim.Optimizer, workers: int) -> str | None:
    """What is not as in synchronous training, and not as large as the gradient's share.

    None for SGD without weight decay, whose updates are as long together.
    """
    is_sgd = type(optimizer) is torch.optim.SGD
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    if is_sgd and not decays:
        return None
    if is_sgd:
        what = "weight_decay acts in each of them"
    else:
        name = type(optimizer).__name__
        what = f"{name}'s updates are not as small as a share of the gradient"
    return (
        f"staleness: each step is {workers} updates, one of each worker's share; {what}: parameters"
        f" may move up to {workers} times as far. See docs/staleness.md"
    )
