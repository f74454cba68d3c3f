"""A thread that writes one rank's checkpoints while training goes on, and what it asks for.

Every rank writes its own part. The lowest rank also waits until the parts of all that are here have
come, and finishes the checkpoint (`session.stored`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foreprop.config import LOGGER
from foreprop.errors import StorageError
from foreprop.session.stored import SHARED, Checkpoint, CheckpointFolder, UnfinishedCheckpoint

_POLL_S = 0.02
_AFTER_FAILURE_S = 2.0
"""How long to wait for ranks whose session has failed: some parts may be nearly there."""


class SavedSession:
    """A session, as far as its checkpoints are concerned. Training thread, but for what says so.

    What is answered here holds for a world of one, which nobody leaves and nobody joins.
    """

    rank = 0
    world_size = 1
    timeout_s = 0.0
    """How long to wait for what other ranks are to do."""
    report_s = 0.0
    """How long until it is said that others are waited for."""
    resumed: Checkpoint | None
    """The checkpoint that it has gone on from."""
    name: str
    """The same on all ranks, and no other training's."""
    joined_at: int | None = None
    """A newcomer's first step, as its session counts."""
    is_elastic = False

    @property
    def before(self) -> int:
        """How many steps were made before the session's first one."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """How many steps the optimizer has made, those before it was resumed included."""
        raise NotImplementedError

    def shared_state(self) -> dict[str, Any]:
        """A copy of what is alike on all ranks; only one rank calls it."""
        raise NotImplementedError

    def own_state(self) -> dict[str, Any]:
        """A copy of what is this rank's alone."""
        raise NotImplementedError

    def at_end(self, function: Callable[[], None]) -> None:
        """Call it when the session ends."""
        raise NotImplementedError

    def save_tables(self, folder: Path) -> None:
        """Save the remote tables, if there are some; only one rank calls it."""

    def meet(self) -> None:
        """Have ranks that may be in different steps meet; every rank calls it."""

    def failed(self) -> bool:
        """Whether the session has ended with an error. Any thread."""
        return False

    def present(self, step: int) -> Sequence[int]:
        """The ranks that have made this step, and have not left since. Any thread."""
        return (0,)

    def left_before(self, step: int) -> Sequence[int]:
        """The ranks that have left before they have made this step. Any thread."""
        return ()

    def is_settled(self) -> bool:
        """Whether nobody is just about to be known to have left. Any thread."""
        return True

    def left(self) -> Sequence[tuple[int, int]]:
        """The ranks that have left, and within which step of the session. Any thread."""
        return ()

    def coming(self) -> Sequence[int]:
        """The next step, as the session counts, if somebody joins at it."""
        return ()

    def numbers(self) -> list[dict[str, Any]]:
        """A copy of the optimizer's numbers (lr, ...), by group."""
        return []

    def join(self, before: int, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Take over the others' optimizer numbers, and how many steps were made ``before``."""

    def raise_if_failed(self) -> None: ...

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        """What every rank gives under this name, by rank; blocks until all have."""
        return [mine]

    def at_early_end(self, function: Callable[[Sequence[int]], None]) -> None:
        """Call it when the session ends before these steps, at which others were to join."""


class CheckpointWriter:
    """Writes one checkpoint at a time. Training thread, but for what says otherwise."""

    def __init__(self, folder: CheckpointFolder, session: SavedSession, *, keep: int) -> None:
        self._folder = folder
        self._session = session
        self._keep = keep
        self._absent: set[int] = set()
        """The ranks that are not in the last checkpoint which this rank has finished."""
        self._hurried = False
        self._thread: threading.Thread | None = None
        self._error: StorageError | None = None

    def write(
        self, unfinished: UnfinishedCheckpoint, contents: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Begin to write ``contents``, by file, which nobody changes any more."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run,
            args=(unfinished, contents),
            name="foreprop-checkpoint",
            daemon=True,  # whoever ends in order waits for it
        )
        self._thread.start()

    def wait(self) -> None:
        """Block until what was begun is written; raises `StorageError` if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_if_failed()

    def end(self, *, failed: bool) -> None:
        """Finish. Where the training has ``failed``, other ranks' parts may not come."""
        self._hurried = failed
        try:
            self.wait()
        except StorageError as error:
            LOGGER.error("at the end: %s", error)

    def raise_if_failed(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def refuse(self, step: int, error: Exception) -> StorageError:
        """The error to raise for a checkpoint that could not be written. Any thread."""
        return StorageError(
            f"rank {self._session.rank} cannot write the checkpoint of step {step} in"
            f" {self._folder.path}: {error}; the one before it is still there"
        )

    # What the thread does.
    def _run(
        self, unfinished: UnfinishedCheckpoint, contents: Mapping[str, Mapping[str, Any]]
    ) -> None:
        try:
            unfinished.write_part(self._session.rank, contents)
            if SHARED in contents:
                self._finish(unfinished)
        except (OSError, RuntimeError, ValueError) as error:  # torch's are the second, msgspec's
            unfinished.remove_part(self._session.rank, shared=SHARED in contents)
            self._error = self.refuse(unfinished.step, error)

    def _finish(self, unfinished: UnfinishedCheckpoint) -> None:
        deadline, failed = time.monotonic() + self._session.timeout_s, False
        while (
            missing := unfinished.missing(self._session.present(unfinished.step))
        ) or not self._session.is_settled():
            if not failed and self._is_over():
                failed = True
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if missing:
            ranks = ", ".join(map(str, missing))
            unfinished.remove()
            if self._is_over():
                LOGGER.warning(
                    "the checkpoint of step %d stays unfinished: rank %s has ended",
                    unfinished.step,
                    ranks,
                )
                return
            raise OSError(f"no part of rank {ranks} within {self._session.timeout_s:g} s")
        here = self._session.present(unfinished.step)  # also those that have come later
        whose = self._folder.finish(
            unfinished,
            max(self._session.world_size, *(rank + 1 for rank in here)),
            keep=self._keep,
            without=self._session.left_before(unfinished.step),
            left=self._session.left(),
        )
        self._folder.remove_older(unfinished)
        absent = {*range(self._session.world_size)} - {*whose}
        if absent - self._absent:  # once for each
            LOGGER.warning(
                "the checkpoint of step %d in %s is of %d ranks; rank %s has left",
                *(unfinished.step, self._folder.path, len(whose)),
                ", ".join(map(str, sorted(absent))),
            )
        self._absent = absent

    def _is_over(self) -> bool:
        return self._hurried or self._session.failed()
