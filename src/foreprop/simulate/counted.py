"""Servers that need not count all workers, in a simulation: their machine, and who is late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from foreprop.core.collect import AnswerSlice, DropPush
from foreprop.core.firstmembers import FirstMembers
from foreprop.core.frames import NO_TOKEN, MessageReady, SendFrame
from foreprop.core.membership import Members
from foreprop.core.server_machine import ServerMachine
from foreprop.core.wire import Flag, Kind
from foreprop.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from foreprop.simulate.served import Agreement


def counting_machine(agreement: Agreement, index: int) -> ServerMachine[FirstMembers]:
    """Raises `ConfigError` where a node stands for several, or all workers would be backups."""
    if any(members > 1 for members in agreement.members):
        raise ConfigError(
            f"backup_workers is {agreement.backup_workers}, but a node stands for several: ask for"
            " symmetric=False (--every-node)"
        )
    workers = len(agreement.members)
    members = Members(workers, backups=agreement.backup_workers)
    return ServerMachine(
        agreement.slices,
        index=index,
        workers=workers,
        order=agreement.order,
        names=[f"parameter {number}" for number in range(agreement.parameters)],
        turns=agreement.turns(index, workers),
        closing=partial(FirstMembers, members=members),
    )


class CountedUpdates:
    """Of one server: carries out what only such servers say."""

    def __init__(self, handle: Callable[[Any], None]) -> None:
        self.done: dict[int, int] = {}
        """By slice, the last step of its values."""
        self._handle = handle

    def do(self, instruction: Any) -> None:
        """To drop a push takes no time."""
        if isinstance(instruction, AnswerSlice):
            slice_, step, priority, ranks, flags, _ = instruction
            if 0 < step < self.done.get(slice_, 0):
                flags |= Flag.LATE
            for rank in ranks:
                about = (step, priority, slice_, NO_TOKEN, flags)
                self._handle(MessageReady(rank, Kind.REPLY, *about))
        elif not isinstance(instruction, DropPush):
            raise InternalError(f"a simulated server cannot do {instruction!r}")


class LateAnswers:
    """Of one worker: those that are newer than its step, as `elastic.departure` finds them."""

    def __init__(self) -> None:
        self._newer_than = 0

    def note(self, reply: SendFrame) -> None:
        if reply.flags & Flag.LATE:
            self._newer_than = max(self._newer_than, reply.step)

    def flags_of(self, step: int) -> int:
        """Of the pushes of a step: those of newer values do not count."""
        return int(Flag.LATE) if step == self._newer_than + 1 > 1 else 0
