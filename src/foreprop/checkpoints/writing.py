"""One rank's checkpoints, written by a thread while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from foreprop.checkpoints.savedsession import SavedSession
from foreprop.checkpoints.stored import SHARED, CheckpointFolder, UnfinishedCheckpoint
from foreprop.config import LOGGER
from foreprop.errors import StorageError

_POLL_S = 0.02
_AFTER_FAILURE_S = 2.0
"""For parts of ranks whose session has failed: some may be nearly there."""


class CheckpointWriter:
    """One checkpoint at a time. Training thread, but for what says otherwise."""

    def __init__(
        self,
        folder: CheckpointFolder,
        *,
        rank: int,
        world_size: int,
        keep: int,
        timeout_s: float,
        session: SavedSession,
    ) -> None:
        """``timeout_s``: for the other ranks' parts. ``session`` says whose never come."""
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self._timeout_s = timeout_s
        self._session = session
        self._absent: set[int] = set()
        """Of the last checkpoint that this rank has finished."""
        self._hurried = False
        self._thread: threading.Thread | None = None
        self._error: StorageError | None = None

    def write(
        self, unfinished: UnfinishedCheckpoint, contents: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Begin; ``contents`` by file, which nobody changes any more."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run,
            args=(unfinished, contents),
            name="foreprop-checkpoint",
            daemon=True,  # whoever ends in order waits for it
        )
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is written; raises `StorageError` if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_if_failed()

    def end(self, *, failed: bool) -> None:
        """The training is over; ``failed``: with an error, and other ranks' parts may not come."""
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
        """What to raise for what has gone wrong with the checkpoint of this step. Any thread."""
        return StorageError(
            f"rank {self._rank} cannot write the checkpoint of step {step} in {self._folder.path}:"
            f" {error}; the one before it is still there"
        )

    # The thread.
    def _run(
        self, unfinished: UnfinishedCheckpoint, contents: Mapping[str, Mapping[str, Any]]
    ) -> None:
        try:
            unfinished.write_part(self._rank, contents)
            if SHARED in contents:
                self._finish(unfinished)
        except (OSError, RuntimeError, ValueError) as error:  # torch's are the second, msgspec's
            unfinished.remove_part(self._rank, shared=SHARED in contents)
            self._error = self.refuse(unfinished.step, error)

    def _finish(self, unfinished: UnfinishedCheckpoint) -> None:
        if missing := self._wait_for_parts(unfinished):
            ranks = ", ".join(map(str, missing))
            unfinished.remove()
            if self._is_over():
                LOGGER.warning(
                    "the checkpoint of step %d stays unfinished: rank %s has ended",
                    unfinished.step,
                    ranks,
                )
                return
            raise OSError(f"no part of rank {ranks} within {self._timeout_s:g} s")
        here = self._session.present(unfinished.step)  # also those that have come later
        whose = self._folder.finish(
            unfinished,
            max(self._world_size, *(rank + 1 for rank in here)),
            keep=self._keep,
            without=self._session.behind(unfinished.step),
            left=self._session.left(),
        )
        self._folder.remove_older(unfinished)
        self._report_absent(unfinished.step, whose)

    def _report_absent(self, step: int, ranks: Collection[int]) -> None:
        """Of a checkpoint with these ranks' parts: once for each other one."""
        absent = {*range(self._world_size)} - {*ranks}
        if absent - self._absent:
            LOGGER.warning(
                "the checkpoint of step %d in %s is of %d ranks; rank %s has left",
                *(step, self._folder.path, len(ranks)),
                ", ".join(map(str, sorted(absent))),
            )
        self._absent = absent

    def _wait_for_parts(self, unfinished: UnfinishedCheckpoint) -> list[int]:
        """The ranks whose parts have not come."""
        deadline, failed = time.monotonic() + self._timeout_s, False
        while (
            missing := unfinished.missing(self._session.present(unfinished.step))
        ) or not self._session.is_settled():
            if not failed and self._is_over():
                failed = True
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return missing

    def _is_over(self) -> bool:
        return self._hurried or self._session.failed()
