"""How a session ends: closed, broken off by an error, or with its process.

`close` first finishes what is under way, together with the other ranks. Where an error has ended
the loop, the session is *released* without that: the others learn of the error and wait for
nothing. The error that ended a loop stays the one that is seen, whatever fails after it. Sessions
that are open when their process ends are closed as they began, on all ranks alike; an error that
nobody catches is told at once (`params.interception.watch_uncaught_errors`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import torch.distributed as dist

from foreprop.config import LOGGER
from foreprop.engine.world import World, wait_for_all_partings
from foreprop.errors import ForepropError, TrainingLoopError
from foreprop.params.interception import release_parameter, watch_uncaught_errors
from foreprop.session.training import Training


class _Sessions(weakref.WeakKeyDictionary["Lifetime", None]):
    """Sessions in the order in which they began; other threads may open and close theirs."""

    def __iter__(self) -> Iterator[Lifetime]:
        lives = [reference() for reference in self.keyrefs()]
        return iter([life for life in lives if life is not None])


_open = _Sessions()  # of this process
_exit_registered = False


class Lifetime:
    """One session's life. The training thread ends it, and other threads at the process's exit."""

    def __init__(self, training: Training, world: World) -> None:
        self.world = world
        self.thread_id = threading.get_ident()
        self.closed = False
        self.connected = False
        self.meetings = 0  # so many there have been, see `session.meeting`
        self._training = training
        self._handled_before = sys.exception()
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        global _exit_registered  # noqa: PLW0603 - once per process
        _open[self] = None
        if not _exit_registered:
            _exit_registered = True
            atexit.register(_close_all)
            watch_uncaught_errors(_give_up_here)
            os.register_at_fork(after_in_child=_forget_all_in_child)

    def add_undo(self, *functions: Callable[[], None]) -> None:
        """Call these when the session ends, the last ones first."""
        self._undo += functions

    def close(self) -> None:
        found = sys.exception()  # as in a ``finally`` that an error leads through
        first = None if found is self._handled_before else found
        with _noted_beside(first):
            if self.closed:
                return
            training = self._training
            if first is not None and training.config.steps_may_differ:
                self.release(failure=first)  # the others do not wait at a meeting
                return
            try:
                if not training.backends.failed:
                    training.saving(True)
                    training.composition.meet("close()")
                    training.settle_all()
                    if training.averaging is not None and training.every_parameter:
                        training.averaging.leave_round()  # of a last step that was not made
                    training.settle_tables()
            except Exception as error:  # whatever it is: the others wait for this rank
                self.release(failure=first or error)
                raise
            self.release(failure=None)

    def leave(self, error: BaseException | None) -> None:
        """Leave at the end of a ``with`` statement, which ``error`` has ended."""
        if error is None:
            self.close()
            return
        with _noted_beside(error):
            self.release(failure=error)

    def release(self, *, failure: BaseException | None) -> None:
        """End without finishing anything first; ``failure`` says why."""
        if self.closed:
            return
        self.closed = True
        _open.pop(self, None)
        training = self._training
        if not (training.stepped and training.first.is_over):
            self._leave_without_step(failure)
        try:
            if self.connected:
                with training.state.quietly():
                    self.disconnect(failure)
        finally:
            self.let_go()
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()
            if (follower := training.composition.follower) is not None:
                follower.end(failure)
            if training.trace is not None:
                training.trace.write()  # last: it may raise

    def _leave_without_step(self, failure: BaseException | None) -> None:
        # say what that means, also to whoever waits for this rank's first step
        training = self._training
        averaged = () if training.averaging is None else training.averaging.gradients
        if failure is None and not training.stepped and any(each.passes for each in averaged):
            text = "step() of the optimizer that was given to parallelize() was never called"
            if training.first.is_over:
                text += ": gradients were averaged when they were read, with no overlap"
            else:
                text += ", and no gradient was read: nothing has been synchronised, ranks may"
                text += " differ"
            training.report(text)
        if self.connected and not training.first.is_over:
            failure = failure or TrainingLoopError(
                "the session was closed before its first step, and another rank has begun one: make"
                " equally many steps on all ranks"
            )
            training.board("priorities").publish_failure(failure)  # on which `FirstStep` waits

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
        """Make the parameters ordinary ones again."""
        training = self._training
        training.first.unwatch()
        for parameter in training.parameters:
            parameter.detach()
            release_parameter(parameter.parameter, training.give_away)

    @contextlib.contextmanager
    def giving_up_on_error(self) -> Iterator[None]:
        """Tell the other ranks of an error inside: what it breaks off cannot be gone on with."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the others that an error has ended this rank's training, whatever comes after."""
        backends = self._training.backends
        if self.connected and not backends.failed:
            backends.give_up(error)


def _give_up_here(error: BaseException) -> None:
    for life in list(_open):
        if life.thread_id == threading.get_ident():
            life.give_up(error)


def _close_all() -> None:
    failure = getattr(sys, "last_value", None)  # an error that nobody has caught
    if _open and dist.is_available() and dist.is_initialized() and "nccl" not in dist.get_backend():
        # Nobody is to wait in a collective of the user's for a rank that waits in `close()` for it,
        # as if the process had ended already. NCCL's groups end when it has, for their work may
        # still be under way here; so do groups that something else still refers to.
        try:
            dist.destroy_process_group()
        except (RuntimeError, ValueError) as error:
            LOGGER.warning("at the end: torch.distributed: %s", error)
    for life in list(_open):
        try:
            if failure is not None:
                life.release(failure=failure)
            else:
                life.close()
        except ForepropError as error:
            LOGGER.error("at the end: %s", error)
    wait_for_all_partings()


def _forget_all_in_child() -> None:
    # the sessions stay the parent's
    for life in list(_open):
        life._training.backends.forget_in_child()
    _open.clear()


@contextlib.contextmanager
def _noted_beside(first: BaseException | None) -> Iterator[None]:
    """Note an error of the end on the first one, which has ended the loop, and do not raise it."""
    try:
        yield
    except ForepropError as second:
        if first is None:
            raise
        causes: list[BaseException] = []
        cause: BaseException | None = first
        while cause is not None and cause not in causes:
            causes.append(cause)
            cause = cause.__cause__ or cause.__context__
        if second not in causes:
            text = f"closing the foreprop session failed, too: {type(second).__name__}: {second}"
            first.add_note(text)
            LOGGER.error("%s", text)
