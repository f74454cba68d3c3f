"""Where a loop is, for a worker that joins the session: left in the folder by members, read there.

Each member leaves it when its loop is through with the step before the newcomer's first one, with
all that the loop does then, so a schedule has made its step. All leave the same, each in a file of
its own, and the newcomer takes the first whole one. It is read as data only, as checkpoints are.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foreprop.checkpoints.contents import LeftState, check_form
from foreprop.checkpoints.stored import CheckpointFolder, part_name
from foreprop.config import LOGGER
from foreprop.errors import ConfigError

_POLL_S = 0.02


class LoopStates:
    """Of one loop. ``token`` names the training; ``rank`` is this one. Training thread."""

    def __init__(self, folder: CheckpointFolder, token: str, rank: int) -> None:
        self._folder = folder
        self._token = token
        self._rank = rank
        self._left: set[int] = set()
        """For these first steps this rank has left its own."""

    def _place(self, first: int) -> Path:
        return self._folder.begin(first, f"{self._token}-joins").path

    # A member.
    def leave(self, first: int, state: dict[str, Any]) -> None:
        """For who joins at this step. A disk that does not take it harms the newcomer alone."""
        if first in self._left:
            return
        self._left.add(first)
        data = io.BytesIO()
        torch.save(state, data)
        place = self._place(first)
        path = place / part_name(self._rank)
        try:
            place.mkdir(exist_ok=True)
            path.with_suffix(".new").write_bytes(data.getvalue())
            os.rename(path.with_suffix(".new"), path)
        except OSError as error:
            LOGGER.warning(
                "rank %d cannot write for who joins at step %d where its loop is: %s",
                *(self._rank, first, error),
            )

    def forget(self, done: int) -> None:
        """So many steps are done: who was to join at one before the last has read it.

        For that one is made with values that count it, and it reads before its first step.
        """
        for first in [each for each in self._left if each < done]:
            self._left.discard(first)
            shutil.rmtree(self._place(first), ignore_errors=True)

    def forget_all(self) -> None:
        """All ranks have ended the session."""
        self.forget(max(self._left, default=0) + 1)

    # A newcomer.
    def wait_for(self, first: int, look: Callable[[], None], report_s: float) -> dict[str, Any]:
        """What a member has left; ``look`` raises what ends the session meanwhile.

        Members that wait for this rank drop it when it is silent for too long. Raises
        `ConfigError` for what cannot be read.
        """
        place, started, reported = self._place(first), time.monotonic(), False
        while not (found := sorted(place.glob("rank-*.pt"))):
            look()
            if not reported and time.monotonic() > started + report_s:
                reported = True
                LOGGER.warning(
                    "rank %d waits for a member to leave in %s where its loop is: do all call"
                    " foreprop.checkpoint() with this folder?",
                    *(self._rank, self._folder.path),
                )
            time.sleep(_POLL_S)
        try:
            state: dict[str, Any] = torch.load(found[0], map_location="cpu", weights_only=True)
            check_form(state, LeftState)
        except Exception as error:  # whatever torch makes of a file that is not its own
            raise ConfigError(f"{found[0]} cannot be read: {error}") from error
        return state
