"""What `foreprop.checkpoint` returns: a training loop that is saved, and goes on where it was."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from foreprop.checkpoints.position import LoaderPosition, State
from foreprop.checkpoints.stored import SHARED, Checkpoint, CheckpointFolder, part_name, tables_name
from foreprop.checkpoints.workerprogress import report_step
from foreprop.checkpoints.writing import CheckpointWriter
from foreprop.config import LOGGER
from foreprop.errors import ConfigError, StorageError


class SavedSession(Protocol):
    """A session, as far as its checkpoints are concerned. Training thread, but for ``failed``."""

    rank: int
    world_size: int
    timeout_s: float
    """For what other ranks are to do."""
    resumed: Checkpoint | None
    """From where it has gone on."""

    @property
    def step(self) -> int:
        """How many the optimizer has made, those before it was resumed included."""

    def shared_state(self) -> dict[str, Any]:
        """A copy of what is alike on all ranks. Rank 0 alone calls it."""

    def own_state(self) -> dict[str, Any]:
        """A copy of what is this rank's alone."""

    def save_tables(self, folder: Path) -> None:
        """Its remote tables, if there are some. Rank 0 alone calls it."""

    def meet(self) -> None:
        """Ranks that may be apart come together; every rank calls it."""

    def failed(self) -> bool:
        """Whether it is over with an error. Any thread."""

    def left(self) -> list[int]:
        """The ranks that the others go on without, or that have come later. Any thread."""

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        """What every rank says under this name, by rank."""

    def at_end(self, function: Callable[[], None]) -> None:
        """Call it when the session ends."""


class CheckpointedLoop:
    """Iterate over it in place of the loader, and over ``epochs(n)`` in place of ``range(n)``.

    A checkpoint is made between two batches, when the body of the loop is through with the first;
    after the last one of an epoch when the epoch is over, with all that the loop does then.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        sessions: list[SavedSession],
        loader: Any,
        objects: Mapping[str, Any],
        *,
        every: int,
        keep: int,
    ) -> None:
        first = sessions[0]
        self._folder = folder
        self._sessions = sessions
        self._objects = objects
        self._every = every
        self._position = LoaderPosition(loader)
        self._in_epochs = False
        self._incomplete = False
        self._saved_step = None if first.resumed is None else first.step
        self._restore(first.resumed)
        self._token = _agree_on_folder(folder, first)
        self._writer = CheckpointWriter(
            folder,
            rank=first.rank,
            world_size=first.world_size,
            keep=keep,
            timeout_s=first.timeout_s,
            failed=first.failed,
            left=first.left,
        )
        first.at_end(self._end)
        report_step(first.rank, first.step)

    # The loop.
    @property
    def step(self) -> int:
        """How many steps the optimizer has made in all."""
        return self._sessions[0].step

    @property
    def epoch(self) -> int:
        """The one that is under way, or that is next."""
        return self._position.epoch

    @property
    def batch(self) -> int:
        """How many batches of this epoch have been used."""
        return self._position.batches

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of those that are still to be done, of ``count`` in all."""
        self._position.be_between()
        self._in_epochs = True
        while self._position.epoch < count:
            yield self._position.epoch
            self._position.end()
            self.end_step()
        self._in_epochs = False
        self.wait()

    def __iter__(self) -> Iterator[Any]:
        """The batches of this epoch that are left. Raises `StorageError` for a full disk."""
        if self._position.loader is None:
            raise ConfigError(
                "foreprop.checkpoint() was given no loader to iterate over: give it loader=..., or"
                " call end_step() at the end of each step"
            )
        batches = self._position.begin()
        while True:
            # as it is before the next batch is read, which may draw random numbers
            position = self._position.state() if self._is_due() else None
            try:
                batch = next(batches)
            except StopIteration:
                if position is not None and not self._in_epochs:  # else when the epoch is over
                    self._save(position)
                return
            if position is not None:
                self._save(position)
            self._writer.raise_if_failed()
            self._position.batches += 1
            yield batch

    def __len__(self) -> int:
        """Of a whole epoch."""
        return len(self._position.loader)

    # Saving.
    def end_step(self) -> None:
        """A step is through, with all that belongs to it: save, if it is time. On every rank."""
        if self._is_due():
            self.save()
        self._writer.raise_if_failed()

    def _is_due(self) -> bool:
        return self.step // self._every > (self._saved_step or 0) // self._every

    def save(self) -> None:
        """Now, between two steps, on every rank. Returns when a copy is made; a thread writes it.

        Raises `StorageError` if the one before could not be written.
        """
        self._save(self._position.state())

    def _save(self, position: State) -> None:
        self._writer.wait()
        step, rank = self.step, self._sessions[0].rank
        if step == self._saved_step:
            return
        self._saved_step = step
        if left := self._sessions[0].left():
            self._report_missing(step, left)
            return
        report_step(rank, step)
        unfinished = self._folder.begin(step, self._token)
        for session in self._sessions:
            session.meet()
        own = {
            "sessions": [session.own_state() for session in self._sessions],
            "objects": {name: copied(one.state_dict()) for name, one in self._objects.items()},
            "position": position,
        }
        contents: dict[str, dict[str, Any]] = {part_name(rank): own}
        if rank == 0:
            shared = [session.shared_state() for session in self._sessions]
            contents[SHARED] = {"step": step, "sessions": shared}
            try:
                for number, session in enumerate(self._sessions):
                    session.save_tables(unfinished.path / tables_name(number))
            except StorageError as error:
                unfinished.remove()
                raise self._writer.refuse(step, error) from error
        for session in self._sessions:
            session.meet()
        self._writer.write(unfinished, contents)

    def _report_missing(self, step: int, left: list[int]) -> None:
        """On the first rank that is there, once."""
        rank, here = self._sessions[0].rank, range(self._sessions[0].world_size)
        if not self._incomplete and rank == next(each for each in here if each not in left):
            LOGGER.warning(
                "from step %d on %s gets no checkpoints: rank %s has left or has come later, and"
                " each rank of the start has a part of them; those before it stay",
                *(step, self._folder.path, ", ".join(map(str, left))),
            )
        self._incomplete = True

    def wait(self) -> None:
        """Until this rank has written what it has begun; rank 0: until the checkpoint is whole."""
        self._writer.wait()

    def _end(self) -> None:
        report_step(self._sessions[0].rank, self.step)
        under_way = sys.exception() or getattr(sys, "last_value", None)
        self._writer.end(failed=under_way is not None)

    # Going on.
    def _restore(self, found: Checkpoint | None) -> None:
        if found is None:
            for name, one in self._objects.items():
                _check_saveable(name, one)
            return
        first = self._sessions[0]
        is_new = first.rank >= found.world_size
        own = found.rank_part(0 if is_new else first.rank)
        self._restore_objects(found, own["objects"])
        position = own["position"]
        if is_new:  # it draws its own numbers, as it has been seeded
            for states in filter(None, (position["now"], position["beginning"])):
                states["random"] = {}
        sizes = {"saved_by": found.world_size, "world_size": first.world_size}
        notice = self._position.restore(position, **sizes)
        if first.rank == 0 and notice is not None:
            LOGGER.info("%s", notice)

    def _restore_objects(self, found: Checkpoint, states: Mapping[str, Any]) -> None:
        if states.keys() != self._objects.keys():
            raise ConfigError(
                f"the checkpoint {found.path} has {sorted(states)}, and foreprop.checkpoint() was"
                f" given {sorted(self._objects)}: give it what it was given then, by the same names"
            )
        for name, one in self._objects.items():
            try:
                one.load_state_dict(states[name])
            except Exception as error:  # whatever the user's object makes of it
                raise ConfigError(
                    f"{name} cannot go on from the checkpoint {found.path}: {error!r}"
                ) from error


def _agree_on_folder(folder: CheckpointFolder, session: SavedSession) -> str:
    """The token of this training's unfinished checkpoints; raises `ConfigError` on all ranks.

    Rank 0 makes room for what this training will write, and the others see whether they see that.
    """
    token, error = os.urandom(4).hex(), ""
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
    if session.rank == 0:
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
    goes_on = resumed is not None and resumed.path.parent.resolve() == folder.path.resolve()
    if there and not goes_on:
        raise ConfigError(
            f"{folder.path} has checkpoints already, the newest of step {there[0]}: go on from it,"
            f" parallelize(..., resume={str(folder.path)!r}), or name another folder"
        )
    if resumed is not None and goes_on:
        folder.remove(step for step in there if step > resumed.step)  # they are damaged
    folder.remove_unfinished()


def _check_saveable(name: str, one: Any) -> None:
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


def copied(value: Any) -> Any:
    """With tensors and containers of its own, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.is_meta else value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value
