"""All ranks use the same folder for their checkpoints, and what they save can be read again."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from typing import Any

import torch

from foreprop.checkpoints.savedsession import SavedSession
from foreprop.checkpoints.stored import Checkpoint, CheckpointFolder
from foreprop.errors import ConfigError
from foreprop.quantities import counted


def token_of(session: SavedSession) -> str:
    """By which the unfinished checkpoints of this training are told apart from those of others."""
    return hashlib.sha256(session.name.encode()).hexdigest()[:8]


def agree_on_folder(folder: CheckpointFolder, session: SavedSession) -> str:
    """The token of this training's unfinished checkpoints; raises `ConfigError` on all ranks.

    Rank 0 makes room for what this training will write, and the others see whether they see that.
    """
    token, error = token_of(session), ""
    if session.rank == 0:
        try:
            _prepare(folder, session.resumed)
            folder.begin(0, token).path.mkdir()
        except (OSError, ConfigError) as failed:
            error = str(failed)
    said = session.exchange("folder", f"{token} {error}", "folder for checkpoints")
    token, _, error = said[0].partition(" ")
    if error:
        raise ConfigError(error)
    if not token.isalnum() or len(token) != 8:
        raise ConfigError(f"the store has {token[:100]!r} for a checkpoint's token")
    mark = folder.begin(0, token)
    seen = session.exchange("seen", str(mark.path.is_dir()), "look at the checkpoints' folder")
    if session.rank == 0 and not session.is_elastic:  # who joins later looks for it, too
        mark.remove()
    blind = [str(rank) for rank, one in enumerate(seen) if one != "True"]
    if blind:
        raise ConfigError(
            f"rank {', '.join(blind)} does not see what rank 0 writes into {folder.path}: all"
            " machines must share the folder of checkpoints"
        )
    return token


def _prepare(folder: CheckpointFolder, resumed: Checkpoint | None) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    there = folder.steps()
    goes_on = resumed is not None and is_from(folder, resumed)
    if there and not goes_on:
        if folder.newest(lambda text: None) is None:
            raise ConfigError(
                f"{folder.path} has checkpoints of {counted(len(there), 'step')}, and none of"
                " them is whole: there is nothing to go on from. Move them away, or name another"
                " folder"
            )
        raise ConfigError(
            f"{folder.path} has checkpoints already, the newest of step {there[0]}: go on from it,"
            f" parallelize(..., resume={str(folder.path)!r}), or name another folder"
        )
    if resumed is not None and goes_on:
        folder.remove(step for step in there if step > resumed.step)  # they are damaged
    folder.remove_unfinished()


def is_from(folder: CheckpointFolder, found: Checkpoint) -> bool:
    """Whether a checkpoint is one of this folder's, and not of one that a training forks from."""
    return found.path.parent.resolve() == folder.path.resolve()


def check_saveable(name: str, one: Any) -> None:
    """Raises `ConfigError` now for what could not be read again."""
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(one, method, None)):
            raise ConfigError(
                f"{name} is a {type(one).__name__}, which has no {method}(): foreprop.checkpoint()"
                " saves schedulers, scalers and others that have both"
            )
    file = io.BytesIO()
    try:
        torch.save(one.state_dict(), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # whatever pickle makes of it
        raise ConfigError(
            f"{name}.state_dict() cannot be read back by torch.load(weights_only=True), which is"
            f" how checkpoints are read: {str(error).splitlines()[0]}"
        ) from error


def check_shared(folder: CheckpointFolder, token: str, rank: int) -> None:
    """Raises `ConfigError` on a newcomer that does not see the folder that the others use."""
    if not folder.begin(0, token).path.is_dir():
        raise ConfigError(
            f"rank {rank}, which has joined, does not see in {folder.path} what the others have"
            " written: give foreprop.checkpoint() their folder, which all machines must share, and"
            " call it as often as they have"
        )


def forget_mark(folder: CheckpointFolder, token: str) -> None:
    """At the end of the training: nobody joins it any more."""
    with contextlib.suppress(OSError):
        os.rmdir(folder.begin(0, token).path)
