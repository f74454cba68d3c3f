"""`foreprop.checkpoint`: checkpoints of a whole training, from which it goes on to the bit."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from foreprop.checkpoints.loop import CheckpointedLoop
from foreprop.checkpoints.savedsession import SavedSession
from foreprop.checkpoints.stored import CheckpointFolder
from foreprop.errors import ConfigError
from foreprop.session import lifetime
from foreprop.session.alone import LoneSession, open_lone_sessions
from foreprop.session.resuming import origin_of
from foreprop.session.savedstates import ConnectedSnapshots, LoneSnapshots
from foreprop.session.session import ConnectedSession, Session

_loops: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many there have been, by session."""


def checkpoint(
    folder: str | os.PathLike[str],
    *,
    every: int,
    loader: Any = None,
    keep: int = 3,
    session: Session | Sequence[Session] | None = None,
    **objects: Any,
) -> CheckpointedLoop:
    """Save the whole training now and then, and go on from there after `parallelize(resume=...)`.

        loop = foreprop.checkpoint("run1", every=500, loader=loader, schedule=schedule)
        for epoch in loop.epochs(10):
            for x, y in loop:
                ...

    What goes on is bit-identical to what would have been without a stop. Call it on every rank,
    after `parallelize` and before the loop. On a worker that joins an elastic session it goes on
    where the others' loops are. docs/checkpoints.md says what is saved.

    Args:
        folder: on storage that all machines share; made if it is not there.
        every: optimizer steps between two checkpoints.
        loader: what the loop iterates over, as `foreprop.shard` returned it.
        keep: how many checkpoints stay; older ones are removed.
        session: by default the one that is open; several in the order of their `parallelize`.
        **objects: whatever has ``state_dict`` and ``load_state_dict``: schedulers, a scaler.

    Raises:
        ConfigError: a setting or object that cannot be used, a folder that not all ranks see, or
            that has another training's checkpoints.
    """
    _check_count("every", every)
    _check_count("keep", keep)
    sessions = _open_sessions() if session is None else session
    sessions = list(sessions) if isinstance(sessions, (list, tuple)) else [sessions]
    if not sessions:
        raise ConfigError("session is an empty list; name those that are to be saved")
    return CheckpointedLoop(
        CheckpointFolder(folder),
        [_snapshots_of(one) for one in sessions],
        loader,
        objects,
        every=every,
        keep=keep,
    )


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _open_sessions() -> list[Any]:
    here = threading.get_ident()
    found: list[Any] = [life for life in list(lifetime._open) if life.thread_id == here]
    found += [one for one in open_lone_sessions if not one._closed]
    if len(found) != 1:
        which = "none is" if not found else f"{len(found)} are"
        raise ConfigError(
            f"foreprop.checkpoint() saves the session that is open here, and {which}: call it after"
            " parallelize(), and with several models say session=[first, second], in the order of"
            " their parallelize()"
        )
    return found


def _snapshots_of(session: Any) -> SavedSession:
    if isinstance(session, LoneSession):
        return LoneSnapshots(session, origin_of(session))
    life = session._training.life if isinstance(session, ConnectedSession) else session
    if not isinstance(life, lifetime.Lifetime):
        raise ConfigError(
            f"session is a {type(session).__name__}; give what parallelize() returned"
        )
    training = life._training
    number = _loops[training] = _loops.get(training, 0) + 1
    return ConnectedSnapshots(training, origin_of(training), number)
