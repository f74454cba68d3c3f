"""What `foreprop.checkpoint` returns: a training loop that is saved, and goes on where it was.

A checkpoint is made between two batches, when the body of the loop is through with the first; after
the last batch of an epoch when the epoch is over, with all that the loop does then. All ranks use
the same folder. A *token* in the names of unfinished checkpoints tells this training's from
others'.

A worker that joins an elastic session begins where the others' loops are. Each member leaves its
loop's state in the folder when it is through with the step before the newcomer's first one
(`LoopStates`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foreprop.config import LOGGER
from foreprop.config.launchers import tell_agent
from foreprop.errors import ConfigError, StorageError
from foreprop.quantities import counted
from foreprop.session.position import LoaderPosition, State
from foreprop.session.stored import (
    SHARED,
    Checkpoint,
    CheckpointFolder,
    LeftState,
    check_form,
    part_name,
    tables_name,
)
from foreprop.session.writing import CheckpointWriter, SavedSession

_POLL_S = 0.02


class CheckpointedLoop:
    """Iterate over it in place of the loader, and over ``epochs(n)`` in place of ``range(n)``."""

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
        self._errors_before = _errors()  # neither is this loop's
        if first.joined_at is None:
            self._restore(first.resumed)
            self._token = agree_on_folder(folder, first)
            self._states = LoopStates(folder, self._token, first.rank)
        else:
            self._token = token_of(first)
            self._states = LoopStates(folder, self._token, first.rank)
            self._join(first, first.joined_at)
        goes_on = first.resumed is not None or first.joined_at is not None
        self._saved_step = first.step if goes_on else None
        """The last step that was saved or gone on from; ``_has_saved``: in this folder."""
        self._has_saved = first.resumed is None or is_from(folder, first.resumed)
        self._writer = CheckpointWriter(folder, first, keep=keep)
        first.at_end(self._end)
        if first.is_elastic:
            first.at_early_end(lambda firsts: self._hand_over(firsts, self._position.state()))
        self._tell_step()

    # The loop.
    @property
    def step(self) -> int:
        """How many steps the optimizer has made in all."""
        return self._sessions[0].step

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that is next."""
        return self._position.epoch

    @property
    def batch(self) -> int:
        """How many batches of this epoch have been used."""
        return self._position.batches

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are still to be done, of ``count`` in all."""
        self._position.be_between()
        self._in_epochs = True
        try:
            while self._position.epoch < count:
                yield self._position.epoch
                self._position.end()
                self.end_step()
        finally:
            self._in_epochs = False  # also where the loop is left early, and goes on without
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
            coming = self._coming()
            position = self._position.state() if coming or self._is_due() else None
            try:
                batch = next(batches)
            except StopIteration:
                if position is not None and not self._in_epochs:  # else when the epoch is over
                    self._settle(position, coming)
                return
            if position is not None:
                self._settle(position, coming)
            self._writer.raise_if_failed()
            self._position.batches += 1
            yield batch

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        return len(self._position.loader)

    # Saving.
    def end_step(self) -> None:
        """Save, if it is time: a step is through, with all that belongs to it. On every rank."""
        coming = self._coming()
        if coming or self._is_due():
            self._settle(self._position.state(), coming)
        self._writer.raise_if_failed()

    def _is_due(self) -> bool:
        return self.step // self._every > (self._saved_step or 0) // self._every

    def _coming(self) -> Sequence[int]:
        first = self._sessions[0]
        if not first.is_elastic:
            return ()
        self._states.forget(first.step - first.before)
        return first.coming()

    def _settle(self, position: State, coming: Sequence[int]) -> None:
        self._hand_over(coming, position)
        if self._is_due():
            self._save(position)

    def _hand_over(self, firsts: Sequence[int], position: State) -> None:
        for first in firsts:
            objects = {name: copied(one.state_dict()) for name, one in self._objects.items()}
            state = {
                "before": self._sessions[0].before,
                "numbers": [session.numbers() for session in self._sessions],
                "objects": objects,
                "position": position,
            }
            self._states.leave(first, state)

    def save(self) -> None:
        """Save now, between two steps, on every rank. Returns when a copy is made for a thread.

        Raises `StorageError` if the checkpoint before could not be written.
        """
        self._save(self._position.state())

    def _save(self, position: State) -> None:
        self._writer.wait()
        step, rank = self.step, self._sessions[0].rank
        if step == self._saved_step and self._has_saved:
            return
        self._saved_step, self._has_saved = step, True
        self._tell_step()
        unfinished = self._folder.begin(step, self._token)
        for session in self._sessions:
            session.meet()
        own = {
            "sessions": [session.own_state() for session in self._sessions],
            "objects": {name: copied(one.state_dict()) for name, one in self._objects.items()},
            "position": position,
        }
        contents: dict[str, dict[str, Any]] = {part_name(rank): own}
        if rank == min(self._sessions[0].present(step), default=rank):
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

    def wait(self) -> None:
        """Block until this rank has written what it has begun; the lowest one: until all have."""
        self._writer.wait()

    def _end(self) -> None:
        self._tell_step()
        failed = any(new is not None and new not in self._errors_before for new in _errors())
        self._writer.end(failed=failed)
        if not failed and self._sessions[0].is_elastic:
            self._states.forget(sys.maxsize)
            with contextlib.suppress(OSError):  # the mark for which newcomers look
                os.rmdir(self._folder.begin(0, self._token).path)

    def _tell_step(self) -> None:
        """Tell ``foreprop run``, which starts failed runs again, how far this rank has come."""
        tell_agent(b"%d %d" % (self._sessions[0].rank, self.step))

    # Going on.
    def _restore(self, found: Checkpoint | None) -> None:
        if found is None:
            for name, one in self._objects.items():
                check_saveable(name, one)
            return
        first = self._sessions[0]
        number, lowest = found.source_rank(first.rank, first.world_size), found.ranks[0]
        whose = lowest if number is None else number
        own = found.rank_part(whose)
        self._restore_objects(f"the checkpoint {found.path}", own["objects"])
        position = own["position"]
        if number is None:  # it draws its own numbers, as it has been seeded
            for states in filter(None, (position["now"], position["beginning"])):
                states["random"] = {}
        with found.used(part_name(whose)):
            notice = self._position.restore(
                position,
                saved_by=found.world_size,
                world_size=first.world_size,
                dealt_by=lambda: found.rank_part(lowest)["position"],
                is_whole=found.is_whole,
                left=found.left,
            )
        if first.rank == 0 and notice is not None:
            LOGGER.info("%s", notice)

    def _join(self, session: SavedSession, first: int) -> None:
        check_shared(self._folder, self._token, session.rank)
        state = self._states.wait_for(first, session.raise_if_failed, session.report_s)
        self._restore_objects(f"what the others have left in {self._folder.path}", state["objects"])
        for each, numbers in zip(self._sessions, state["numbers"], strict=True):
            each.join(state["before"], numbers)
        self._position.join(state["position"])

    def _restore_objects(self, where: str, states: Mapping[str, Any]) -> None:
        if states.keys() != self._objects.keys():
            raise ConfigError(
                f"{where} has {sorted(states)}, and foreprop.checkpoint() was given"
                f" {sorted(self._objects)}: give it what it was given then, by the same names"
            )
        for name, one in self._objects.items():
            try:
                one.load_state_dict(states[name])
            except Exception as error:  # whatever the user's object makes of it
                raise ConfigError(f"{name} cannot go on from {where}: {error!r}") from error


def _errors() -> tuple[BaseException | None, BaseException | None]:
    """The error that is being handled, and the one that nobody has handled."""
    return sys.exception(), getattr(sys, "last_value", None)


def copied(value: Any) -> Any:
    """A value with tensors and containers of its own, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.is_meta else value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


class LoopStates:
    """Where a loop is, for a worker that joins the session: left in the folder by members.

    All members leave the same, each in a file of its own, with all that the loop does at the step's
    end, so a schedule has made its step. The newcomer takes the first whole file. It is read as
    data only, as checkpoints are. ``token`` names the training. Training thread.
    """

    def __init__(self, folder: CheckpointFolder, token: str, rank: int) -> None:
        self._folder = folder
        self._token = token
        self._rank = rank
        self._left: set[int] = set()  # by the newcomers' first steps

    def _place(self, first: int) -> Path:
        return self._folder.begin(first, f"{self._token}-joins").path

    def leave(self, first: int, state: dict[str, Any]) -> None:
        """Leave it for who joins at this step. A full disk harms the newcomer alone."""
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
        """Remove what newcomers have read when so many steps are done."""
        # a step is made with values that count the newcomer, which reads before its first step; so
        # who was to join before the last step has read
        for first in [each for each in self._left if each < done]:
            self._left.discard(first)
            shutil.rmtree(self._place(first), ignore_errors=True)

    def wait_for(self, first: int, look: Callable[[], None], report_s: float) -> dict[str, Any]:
        """What a member has left for this newcomer; raises `ConfigError` if it cannot be read.

        Calls ``look`` meanwhile, which raises what ends the session. Members that wait for this
        rank drop it when it is silent for too long.
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


def token_of(session: SavedSession) -> str:
    return hashlib.sha256(session.name.encode()).hexdigest()[:8]


def agree_on_folder(folder: CheckpointFolder, session: SavedSession) -> str:
    """The token, once all ranks see one folder; raises `ConfigError` on all ranks otherwise."""
    token, error = token_of(session), ""
    if session.rank == 0:
        try:  # make a mark, for which the others look
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
    """Whether the checkpoint is in this folder, and not in one that a training forks from."""
    return found.path.parent.resolve() == folder.path.resolve()


def check_saveable(name: str, one: Any) -> None:
    """Raise `ConfigError` now for what could not be read again."""
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
    """Raise `ConfigError` on a newcomer that does not see the folder that the others use."""
    if not folder.begin(0, token).path.is_dir():
        raise ConfigError(
            f"rank {rank}, which has joined, does not see in {folder.path} what the others have"
            " written: give foreprop.checkpoint() their folder, which all machines must share, and"
            " call it as often as they have"
        )
