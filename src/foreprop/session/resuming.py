"""`parallelize(..., resume=folder)`: from the newest checkpoint that is whole, on all ranks."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from foreprop.checkpoints.stored import SHARED, Checkpoint, CheckpointFolder
from foreprop.cluster.entries import decode_entry
from foreprop.cluster.rendezvous import Board
from foreprop.cluster.world import World, current_world
from foreprop.config import LOGGER, Config
from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.session.alone import LoneSession
from foreprop.session.savedstates import load_model_and_optimizer, resume_alone, resume_connected
from foreprop.session.session import ConnectedSession, Session, connect

Owner = Any
"""A `session.training.Training`, or a `LoneSession`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Of a session that has been told to go on from a folder; ``found`` is None if it was empty."""

    folder: Path
    thread_id: int
    found: Checkpoint | None


_origins: weakref.WeakKeyDictionary[Owner, Origin] = weakref.WeakKeyDictionary()


def origin_of(owner: Owner) -> Checkpoint | None:
    origin = _origins.get(owner)
    return None if origin is None else origin.found


def resumed(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    scaler: torch.amp.GradScaler | None,
    *,
    world: World | None,
    lone: bool,
) -> Session:
    """A session that goes on from the folder's newest checkpoint, if there is one."""
    if config.join is not None:  # the others' values count, and their progress
        return connect(model, optimizer, config, world=world, scaler=scaler)
    world = None if lone else world or current_world(config.join_timeout_s)
    resumption = Resumption(folder, config, world)
    resumption.load(model, optimizer)
    session: Session
    if world is None:
        session = LoneSession(model, optimizer, config, scaler)
    else:
        session = connect(model, optimizer, config, world=world, scaler=scaler)
    resumption.finish(session)
    return session


class Resumption:
    """Of the session that is about to begin. Training thread."""

    def __init__(self, folder: str | os.PathLike[str], config: Config, world: World | None) -> None:
        """``world``: None for one without servers."""
        self._folder = Path(folder)
        self._world = world
        self._board = None if world is None else _board(world, config)
        self._number = _open_from(self._folder)
        self._found: Checkpoint | None = None

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Before connecting, so that rank 0's become everybody's. `ConfigError` on all ranks."""
        folder, error = CheckpointFolder(self._folder), ""
        step = self._agree(folder)
        if step < 0:
            self._report("there is no checkpoint in %s yet: the training begins", folder.path)
            return
        try:
            self._found = folder.open(step)
            self._load(self._found, model, optimizer)
        except ConfigError as failed:
            error = str(failed)
        for rank, text in enumerate(self._exchange("loaded", error)):
            if text:
                raise ConfigError(f"rank {rank}: {text}" if self._board else text)

    def _load(
        self, found: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        size = 1 if self._world is None else self._world.size
        made = f"{counted(found.world_size, 'rank')} made"
        if not found.is_whole:
            made = f"rank {', '.join(map(str, found.ranks))} of {found.world_size} made"
        more = f", which {made}: {size} do not make the same bits"
        more = more if size != found.world_size or not found.is_whole else ""
        self._report("goes on from step %d in %s%s", found.step, self._folder, more)
        saved = found.session(SHARED, self._number)
        load_model_and_optimizer(model, optimizer, saved, found.path)

    def finish(self, session: Session) -> None:
        """After connecting: what is each rank's own, and what only servers have."""
        owner: Owner = session._training if isinstance(session, ConnectedSession) else session
        _origins[owner] = Origin(self._folder, threading.get_ident(), self._found)
        try:
            self._finish(owner)
        except BaseException as error:
            session.__exit__(type(error), error, error.__traceback__)
            raise

    def _finish(self, owner: Owner) -> None:
        if self._found is not None and self._world is None:
            resume_alone(owner, self._found, self._number)
        elif self._found is not None:
            resume_connected(owner, self._found, self._number)

    def _agree(self, folder: CheckpointFolder) -> int:
        """Rank 0 looks, and checks every byte. The step of what it has found; -1 if nothing."""
        own = _find_newest(folder) if self._is_first else Newest()
        text = self._exchange("newest", msgspec.json.encode(own).decode())[0]
        newest: Newest = decode_entry(text, Newest, "rank 0's newest checkpoint")
        if newest.error:
            raise ConfigError(newest.error)
        return newest.step

    @property
    def _is_first(self) -> bool:
        return self._world is None or self._world.rank == 0

    def _report(self, text: str, *values: object) -> None:
        if self._is_first:
            LOGGER.info(text, *values)

    def _exchange(self, name: str, mine: str) -> list[str]:
        if self._board is None:
            return [mine]
        return self._board.exchange(name, mine, "part of the checkpoint")


class Newest(msgspec.Struct, frozen=True):
    """What rank 0 has found."""

    step: Annotated[int, msgspec.Meta(ge=-1, lt=10**15)] = -1
    """-1: there is none."""
    error: Annotated[str, msgspec.Meta(max_length=1000)] = ""


def _find_newest(folder: CheckpointFolder) -> Newest:
    try:
        found = folder.newest(lambda text: LOGGER.warning("%s", text))
    except OSError as error:
        return Newest(
            error=f"the folder of checkpoints {folder.path} cannot be read: {error}"[:1000]
        )
    return Newest() if found is None else Newest(step=found.step)


def _board(world: World, config: Config) -> Board:
    world.limit_store(config)
    key = f"resume/{world.sessions}"  # of the session that is about to begin
    return Board(world, key, timeout_s=config.join_timeout_s, report_s=config.stall_report_s)


def _open_from(folder: Path) -> int:
    """How many open sessions of this thread go on from it: with several models the order counts."""
    origins = [origin for owner, origin in _origins.items() if not _is_closed(owner)]
    here = threading.get_ident()
    return sum(origin.folder == folder and origin.thread_id == here for origin in origins)


def _is_closed(owner: Owner) -> bool:
    life = getattr(owner, "life", None)
    return bool(owner._closed if life is None else life.closed)
