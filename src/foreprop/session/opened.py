"""The open sessions of this process, which are closed when it ends."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Protocol

from foreprop.cluster.parting import wait_for_all
from foreprop.cluster.world import World
from foreprop.errors import ForepropError
from foreprop.hooks.interception import watch_uncaught_errors


class Closable(Protocol):
    """A session's machinery, which lives as long as anything of the user's refers to it."""

    world: World
    thread_id: int

    def close(self) -> None:
        """As `Session.close`."""

    def release(self, *, failure: BaseException | None) -> None:
        """Leave; ``failure`` is why nothing is finished first."""

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one goes on no more."""

    def forget_in_child(self) -> None:
        """In a forked child: the session is the parent's."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_exit_registered = False


def enter(session: Closable) -> None:
    global _exit_registered  # noqa: PLW0603 - once per process
    _open.add(session)
    if not _exit_registered:
        _exit_registered = True
        atexit.register(close_all)
        watch_uncaught_errors(_open)
        os.register_at_fork(after_in_child=_forget_all_in_child)


def leave(session: Closable) -> None:
    _open.discard(session)


def has_siblings(world: World) -> bool:
    """Whether this rank has a session open."""
    return any(session.world is world for session in _open)


def close_all() -> None:
    """Close every open session of this process; after an uncaught error, tell the others why."""
    failure = getattr(sys, "last_value", None)
    for session in list(_open):
        try:
            if failure is not None:
                session.release(failure=failure)
            else:
                session.close()
        except ForepropError as error:
            print(f"foreprop: at the end: {error}", file=sys.stderr, flush=True)
    wait_for_all()


def _forget_all_in_child() -> None:
    for session in list(_open):
        session.forget_in_child()
    _open.clear()
