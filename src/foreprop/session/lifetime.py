"""How a session ends: closed, broken off by an error, or with its process.

The error that ended a loop stays the one that is seen, whatever fails after it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from foreprop.cluster.world import World, wait_for_all_partings
from foreprop.config import LOGGER
from foreprop.errors import ForepropError
from foreprop.hooks.interception import release_parameter, watch_uncaught_errors

if TYPE_CHECKING:
    from foreprop.session.training import Training


class _Sessions(weakref.WeakKeyDictionary["Lifetime", None]):
    """In the order in which they began; other threads may open and close theirs meanwhile."""

    def __iter__(self) -> Iterator[Lifetime]:
        lives = [reference() for reference in self.keyrefs()]
        return iter([life for life in lives if life is not None])


_open = _Sessions()
"""The open sessions of this process, closed when it ends as they began, on all ranks alike."""
_exit_registered = False


class Lifetime:
    """One session's. The training thread ends it, and other threads at the process's exit."""

    def __init__(self, training: Training, world: World) -> None:
        self.world = world
        self.thread_id = threading.get_ident()
        self.closed = False
        self.connected = False
        self.meetings = 0  # of ranks that may be apart
        self._training = training
        self._handled_before = sys.exception()
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """The session is open."""
        global _exit_registered  # noqa: PLW0603 - once per process
        _open[self] = None
        if not _exit_registered:
            _exit_registered = True
            atexit.register(_close_all)
            watch_uncaught_errors(_open)
            os.register_at_fork(after_in_child=_forget_all_in_child)

    def add_undo(self, *functions: Callable[[], None]) -> None:
        """Call these when the session ends, the last ones first."""
        self._undo += functions

    def close(self) -> None:
        first = _error_under_way(self._handled_before)
        try:
            self._close(first)
        except ForepropError as error:
            if first is None:
                raise
            from foreprop.session.seconderror import put_behind

            put_behind(first, error)

    def _close(self, first: BaseException | None) -> None:
        if self.closed:
            return
        training = self._training
        if first is not None and (training.config.staleness or training.config.backup_workers):
            self.release(failure=first)  # the others do not wait at a meeting
            return
        try:
            if not training.backends.failed:
                training.meet("close()")
                training.settle_all()
                if training.averaging is not None and training.every_parameter:
                    training.averaging.leave_round()  # of a last step that was not made
                training.saving(True)
                training.settle_tables()
        except Exception as error:  # whatever it is: the others wait for this rank
            self.release(failure=first or error)
            raise
        self.release(failure=None)

    def leave(self, error: BaseException | None) -> None:
        """The end of a ``with`` statement, which ``error`` has ended."""
        if error is None:
            self.close()
            return
        try:
            self.release(failure=error)
        except ForepropError as second:
            from foreprop.session.seconderror import put_behind

            put_behind(error, second)

    def release(self, *, failure: BaseException | None) -> None:
        """Leave; ``failure`` is why nothing is finished first."""
        if self.closed:
            return
        self.closed = True
        _open.pop(self, None)
        training = self._training
        if not (training.stepped and training.first.is_over):
            from foreprop.session.unapplied import leave_without_step

            leave_without_step(training, failure)
        try:
            if self.connected:
                with training.state.quietly():
                    self.disconnect(failure)
        finally:
            self.let_go()
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()
            if training.follower is not None:
                training.follower.end(failure)
            if training.trace is not None:
                training.trace.write()  # last: it may raise

    def disconnect(self, failure: BaseException | None) -> None:
        backends = self._training.backends
        failed = failure is not None or backends.failed
        self.connected = False
        partings = self.world.partings
        backends.close(failed=failed)
        if self.closed and not failed and any(other.world is self.world for other in _open):
            partings.begin(backends.part)
            return
        backends.part(failure)
        if not failed:
            partings.wait()

    def let_go(self) -> None:
        """The parameters are ordinary ones again."""
        training = self._training
        training.first.unwatch()
        for parameter in training.parameters:
            parameter.detach()
            release_parameter(parameter.parameter, training)

    @contextlib.contextmanager
    def told_if_it_fails(self) -> Iterator[None]:
        """What is broken off here cannot be gone on with: the other ranks need not wait for it."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """This rank's training has ended with an error: tell the others, whatever comes after."""
        backends = self._training.backends
        if self.connected and not backends.failed:
            backends.give_up(error)

    def forget_in_child(self) -> None:
        """In a forked child: the session is the parent's."""
        self._training.backends.forget_in_child()


def _close_all() -> None:
    """Close every open session of this process; after an uncaught error, tell the others why."""
    failure = getattr(sys, "last_value", None)
    if _open:
        _leave_collectives()
    for life in list(_open):
        try:
            if failure is not None:
                life.release(failure=failure)
            else:
                life.close()
        except ForepropError as error:
            LOGGER.error("at the end: %s", error)
    wait_for_all_partings()


def _leave_collectives() -> None:
    """Nobody is to wait in a collective of the user's for a rank that waits in `close()` for it.

    As if the process had ended already. NCCL's groups end when it has, for their work may still be
    under way here; so do groups that something else still refers to.
    """
    if not (dist.is_available() and dist.is_initialized()) or "nccl" in dist.get_backend():
        return
    try:
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        LOGGER.warning("at the end: torch.distributed: %s", error)


def _forget_all_in_child() -> None:
    for life in list(_open):
        life.forget_in_child()
    _open.clear()


def _error_under_way(before: BaseException | None) -> BaseException | None:
    """What is being handled, as in a ``finally`` that an error leads through.

    ``before``: what was being handled when the session began, which is not its loop's.
    """
    found = sys.exception()
    return None if found is before else found
