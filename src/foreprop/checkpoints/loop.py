"""What `foreprop.checkpoint` returns: a training loop that is saved, and goes on where it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from foreprop.checkpoints.agreeing import (
    agree_on_folder,
    check_saveable,
    check_shared,
    forget_mark,
    is_from,
    token_of,
)
from foreprop.checkpoints.loopstates import LoopStates
from foreprop.checkpoints.position import LoaderPosition, State
from foreprop.checkpoints.savedsession import SavedSession
from foreprop.checkpoints.stored import SHARED, Checkpoint, CheckpointFolder, part_name, tables_name
from foreprop.checkpoints.workerprogress import report_step
from foreprop.checkpoints.writing import CheckpointWriter
from foreprop.config import LOGGER
from foreprop.errors import ConfigError, StorageError


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
        self._errors_before = _errors()
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
        """The last one that was saved or gone on from; ``_has_saved``: in this folder."""
        self._has_saved = first.resumed is None or is_from(folder, first.resumed)
        self._writer = CheckpointWriter(
            folder,
            rank=first.rank,
            world_size=first.world_size,
            keep=keep,
            timeout_s=first.timeout_s,
            session=first,
        )
        first.at_end(self._end)
        if first.is_elastic:
            first.at_early_end(lambda firsts: self._hand_over(firsts, self._position.state()))
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
        """Of a whole epoch."""
        return len(self._position.loader)

    # Saving.
    def end_step(self) -> None:
        """A step is through, with all that belongs to it: save, if it is time. On every rank."""
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
        """A step is through: leave word for who joins now, and save, if it is time."""
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
        """Now, between two steps, on every rank. Returns when a copy is made; a thread writes it.

        Raises `StorageError` if the one before could not be written.
        """
        self._save(self._position.state())

    def _save(self, position: State) -> None:
        self._writer.wait()
        step, rank = self.step, self._sessions[0].rank
        if step == self._saved_step and self._has_saved:
            return
        self._saved_step, self._has_saved = step, True
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
        """Until this rank has written what it has begun; the lowest one: until all have."""
        self._writer.wait()

    def _end(self) -> None:
        report_step(self._sessions[0].rank, self.step)
        failed = any(new is not None and new not in self._errors_before for new in _errors())
        self._writer.end(failed=failed)
        if not failed and self._sessions[0].is_elastic:
            self._states.forget_all()
            forget_mark(self._folder, self._token)

    # Going on.
    def _restore(self, found: Checkpoint | None) -> None:
        if found is None:
            for name, one in self._objects.items():
                check_saveable(name, one)
            return
        first = self._sessions[0]
        number, lowest = found.whose(first.rank, first.world_size), found.ranks[0]
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
        """A newcomer: go on where the others' loops are."""
        check_shared(self._folder, self._token, session.rank)
        state = self._states.wait_for(first, session.look, session.report_s)
        self._restore_objects(f"what the others have left in {self._folder.path}", state["objects"])
        for each, numbers in zip(self._sessions, state["numbers"], strict=True):
            each.come(state["before"], numbers)
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
    """What is being handled, and what nobody has handled: at the start neither is this loop's."""
    return sys.exception(), getattr(sys, "last_value", None)


def copied(value: Any) -> Any:
    """With tensors and containers of its own, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.is_meta else value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value
