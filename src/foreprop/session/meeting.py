"""Where ranks that may be in different steps meet: at `flush()` and `close()`, which all call.

With staleness ranks may be in different steps, and with backup workers some may be behind. They
also meet after a step that all know of, in which slices are to move (``rebalance_s``), or codecs
are chosen (``compression="auto"``).

At a meeting each rank waits until all have come, and its own updates are in. Then all read the same
values again, and rank 0's buffers, and nobody goes on before all have. Between meetings each rank's
buffers are its own: it cannot wait for those of a step that another rank has not made.

In an elastic session nobody is waited for: the store may be gone, and who has died does not come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from foreprop.backends.composedworker import ServedBackend
from foreprop.core.codec import is_automatic
from foreprop.core.frames import LAST_PRIORITY
from foreprop.core.wire import Kind
from foreprop.engine.rendezvous import decode_entry
from foreprop.engine.stream import is_loopback
from foreprop.engine.worker import WorkerEngine
from foreprop.engine.world import report_no_secret
from foreprop.errors import InternalError, TrainingLoopError
from foreprop.session.training import Training

MOVE, CHOICE = "a move of slices", "the choice of codecs"
_INTERNAL = {MOVE, CHOICE}
"""What no user calls. It is left out where others have come for something else."""


def meet(training: Training, where: str) -> bool:
    """Have all ranks show the same values, those with all updates so far. Training thread.

    ``where``: what the user calls, on every rank, or `MOVE` or `CHOICE`. False: not all have come
    for that, so nobody moves slices, or chooses. Raises `TrainingLoopError` where ranks call
    different things, or are further apart than they may be; `StepTimeout` if one does not come.
    """
    if training.config.staleness == "late":
        return True  # ranks are in the same step
    if training.config.elastic:
        _settle(training)
        _read_again(training)
        if training.tables:  # nobody goes on before all have the rows
            _read_again(training, tables=False)
        return True
    while (said := _meet_once(training, where)) != {where}:
        moves = training.composition.rebalancing
        if MOVE in said - {where} and moves is not None:
            moves.leave_out()  # who has come for that has gone on
        if where in _INTERNAL:
            return False
    return True


def _meet_once(training: Training, where: str) -> set[str]:
    training.life.meetings = number = training.life.meetings + 1
    board = training.board(f"meeting/{number}")
    what = f"{where}, which all ranks call together with {_setting_of(training)}"
    said = board.exchange("come", json.dumps([where, training.completed]), what)
    if number > 1:
        before = training.board(f"meeting/{number - 1}")
        for name in ("come", "settled", "read"):
            before.forget(f"{name}/{training.world.rank}")
    words: list[tuple[str, int]]
    words = [decode_entry(text, tuple[str, int], what) for text in said]
    _check(training, words)
    _settle(training)
    board.exchange("settled", "", f"updates before {where}")
    _read_again(training)
    if training.user.buffers:
        if training.buffers.publishes:
            training.buffers.publish(number)
        elif training.world.rank:
            training.buffers.fetch(number)
    board.exchange("read", "", f"parameters after {where}")
    return {word for word, _ in words}


def _settle(training: Training) -> None:
    training.settle_all()
    if training.tables:
        training.tables[0].exchange.settle_rows()


def _check(training: Training, said: Sequence[tuple[str, int]]) -> None:
    first, steps = said[0][0], [step for _, step in said]
    for rank, (where, _) in enumerate(said):
        if _INTERNAL.isdisjoint((where, first)) and where != first:
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
    backups, staleness = training.config.backup_workers, training.config.staleness
    return f"backup_workers={backups}" if backups else f"staleness={staleness}"


def _read_again(training: Training, *, tables: bool = True) -> None:
    """Have the servers send all values as they are now."""
    read = [p for p in training.parameters if tables or p.arrival not in training.tables]
    for engine in training.backends.engines:
        if not isinstance(engine, WorkerEngine):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in read:
                increment_version(parameter.parameter)
        engine.await_values()
        for piece in engine.slices:
            # with backup workers all ranks read together
            made = engine.steps if training.config.backup_workers else 0
            about = (piece.server, Kind.PULL, made, LAST_PRIORITY, b"")
            engine.send_message(*about, slice_=piece.number)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for parameter in read:
            parameter.arrival.receive_initial_value()
        training.settle_tables()


def keep_own_buffers(training: Training) -> None:
    training.publishes_buffers = False
    training.buffers.keeps_own = True


def begin(training: Training) -> None:
    """Prepare a session in which ranks may be in different steps, or whose workers may leave."""
    if training.config.counts_some:
        keep_own_buffers(training)
        if training.config.elastic:
            begin_elastic(training)
        return
    if training.config.staleness == "late":
        from foreprop.features.members.lateparameter import ForwardPass, LateValues

        forward = ForwardPass(training.user.model)
        training.life.add_undo(forward.forget)
        for arrival in training.arrivals:
            if isinstance(arrival, LateValues):
                arrival.forward = forward
        return
    backend = training.backends.all[0]
    if isinstance(backend, ServedBackend) and training.world.size > 1:
        training.report(_describe_effect(training.user.optimizer, training.world.size))
    keep_own_buffers(training)


def _describe_effect(optimizer: torch.optim.Optimizer, workers: int) -> str | None:
    # what is not as in synchronous training; the updates of SGD without weight decay add up alike
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
        f" may move up to {workers} times as far. See docs/elastic.md"
    )


# An elastic session.
def backend_of(training: Training) -> ServedBackend:
    backend = training.backends.all[0]
    if not isinstance(backend, ServedBackend):
        raise InternalError("an elastic session without servers")
    return backend


def begin_elastic(training: Training) -> None:
    """Prepare an elastic session, whose servers have all been joined."""
    backend = backend_of(training)
    if backend.joined_at is not None:
        if (told := backend.told) is not None:
            training.first_session_id = told.begun_as
            training.completed_before = told.steps_before
        training.completed = backend.joined_at - 1
        if training.averaging is not None:
            training.averaging.rounds.step = backend.joined_at
        training.first.is_over = True  # the others have chosen, and ranked the parameters
        training.buffers.have_come = True
    world, address = training.world, backend.connections.address
    # the start has warned if there were several machines by then (`World.use_secret`)
    known = training.config.secret_file is not None or world.size > world.local_size
    grows = training.config.max_workers is not None
    if grows and world.rank == 0 and not known and not is_loopback(address):
        report_no_secret()
    members = backend.members
    if members is not None and members.notices is not None:
        members.notices.steps_before = training.steps_before
        training.given_model = members.notices.model
        if training.given_model is not None and training.added is not None:
            training.given_model.keeps_averages(training.added)
    if members is not None and members.survival is not None:
        members.survival.steps_before = training.steps_before
    tell_newcomers(training)


def tell_newcomers(training: Training) -> None:
    """Tell newcomers where servers are, and the rest that they must know; codecs are chosen."""
    members, setting = backend_of(training).members, training.config.compression
    if members is not None and members.directory is not None:
        is_open = is_automatic(setting)
        members.directory.tell_about(
            compression="" if is_open else str(setting or ""),
            chooses=is_open and training.world.size > 1,
            begun_as=training.first_session_id,
            steps_before=training.steps_before,
        )
