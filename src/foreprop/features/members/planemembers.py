"""An elastic session whose slices the native plane carries: its machines, and who tells the plane.

The plane's machines decide about slices as `core.firstmembers` and `core.worker_machine` do. Who is
a member, and which server has a slice, is decided here, and the plane is told. It closes no round
between a change and `GoOn`: so members hear of the change before any average that it has changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from foreprop.core.frames import CameAfter, Round, SlicesGoOn, SlicesLost
from foreprop.core.membership import MemberLeft, PeerDropped
from foreprop.core.newcomers import AnswerJoin, JoinAsked, JoinSettled
from foreprop.core.takeover import SlicesSettled
from foreprop.engine.executor import Doer, Executor
from foreprop.engine.plane import Plane, PlaneWorker
from foreprop.engine.planeserver import PlaneServer
from foreprop.engine.worker import WorkerEngine

_MOST_WAIT_MS = 100
_MOST_NUMBERS = 1 << 16


class GoOn(NamedTuple):
    """Have the plane close what waits for no member any more: all have been told."""


class MembersPlaneServer(PlaneServer):
    """A server's machine with the rule `core.firstmembers.FirstMembers`, beside the plane."""

    def __init__(self, *about: Any, **settings: Any) -> None:
        super().__init__(*about, **settings)
        self._handlers |= {
            PeerDropped: self._drop,
            JoinAsked: self._ask,
            JoinSettled: self._settle,
            SlicesSettled: self._take_over,
        }

    def _by_rule(self, event: PeerDropped | JoinSettled) -> Sequence[Any]:
        return self._follow(self.closing.handlers[type(event)](event))

    def _drop(self, event: PeerDropped) -> Sequence[Any]:
        three = (ctypes.c_int64 * 3)()
        self._plane.ask("fp_drop", self._index, event.rank, three)
        said = dict(zip(("step", "counted", "slices"), three, strict=True))
        told = self._by_rule(event)
        left = [each._replace(**said) if type(each) is MemberLeft else each for each in told]
        return [*left, GoOn()]

    def _ask(self, event: JoinAsked) -> Sequence[Any]:
        self.closing.newcomers.begin_anew(event.rank)
        four = (ctypes.c_int64 * 4)()
        self._plane.ask("fp_join", self._index, *event, four)
        step, least, newest, ending = four
        answer = AnswerJoin(event.rank, step, least, newest, ending=bool(ending))
        if answer.step:
            self.closing.newcomers.promise(event.rank, answer.step)
        return [answer, GoOn()]

    def _settle(self, event: JoinSettled) -> Sequence[Any]:
        told = self._by_rule(event)
        self._plane.ask("fp_settle", self._index, event.rank, event.step)
        return [*told, GoOn()]

    def _take_over(self, event: SlicesSettled) -> Sequence[Any]:
        told = self._on_slices_settled(event)
        for piece in event.pieces:
            self._plane.ask("fp_take_over", self._index, piece.number, *event.rounds[piece.number])
        return told

    def _note_first_pushes(self) -> None:
        """Note which newcomers have pushed, and so have the others' values."""
        newcomers = self.closing.newcomers
        for rank, awaited in list(newcomers.awaiting.items()):
            last = self._plane.last_push(self._index, rank)
            if last is not None and last[1] >= awaited.step:
                newcomers.has_pushed(rank)

    def draw_counted(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Slice, step and ranks of each round that has counted others than the one before."""
        room = np.empty(_MOST_NUMBERS, dtype=np.int64)
        about = (self._index, room.ctypes.data, len(room))
        while count := self._plane.ask("fp_counted", *about, otherwise=0):
            numbers = iter(room[:count].tolist())
            for slice_ in numbers:
                step, ranks = next(numbers), next(numbers)
                yield slice_, step, tuple(next(numbers) for _ in range(ranks))

    # Read-only views.
    def can_spare(self, rank: int) -> bool:
        self._note_first_pushes()
        return super().can_spare(rank)

    def incomplete(self) -> list[tuple[int, int]]:
        with self._looking():
            states, missing = self._states, self.closing.missing
            return [each for each in self.closing.incomplete() if missing(states[each[0]], each[1])]

    def awaited(self) -> set[int]:
        with self._looking():
            return super().awaited()

    def priorities(self) -> list[tuple[int, int]]:
        with self._looking():
            return super().priorities()

    def has_sent_all(self, rank: int) -> bool:
        has_sent = self._plane.ask("fp_sent_all", self._index, rank, otherwise=1)
        return super().has_sent_all(rank) and bool(has_sent)


def going_on(executor: Executor, plane: Plane) -> dict[type, Doer]:
    """What the executor of a server does for `GoOn`."""

    def go_on(_: GoOn) -> None:
        with executor.lock:  # nobody else has begun to tell the members of a change
            plane.ask("fp_go_on", executor.host.index)

    return {GoOn: go_on}


def await_heard(engine: WorkerEngine) -> None:
    """Return when all that servers have said so far beside slices has been read.

    The plane may have averages before Python has what came ahead of them.
    """
    plane = engine.plane
    while plane is not None and not plane.ask("fp_heard", _MOST_WAIT_MS, otherwise=True):
        engine.progress.raise_if_failed()  # who reads may have ended


class MembersPlaneWorker(PlaneWorker):
    """A worker's machine beside the plane, which outlives the loss of servers."""

    def __init__(self, *about: Any, **settings: Any) -> None:
        super().__init__(*about, **settings)
        self._handlers |= {
            SlicesLost: self._lose_slices,
            SlicesGoOn: self._go_on,
            CameAfter: self._come_after,
        }

    def _lose_slices(self, event: SlicesLost) -> Sequence[Any]:
        server = -1 if event.server is None else event.server
        pairs = [number for pair in event.owners.items() for number in pair]
        numbers = (ctypes.c_int * len(pairs))(*pairs)
        self._plane.ask("fp_slices_lost", server, numbers, len(event.owners))
        return ()

    def _go_on(self, event: SlicesGoOn) -> Sequence[Any]:
        flat = [number for slice_, at in event.rounds.items() for number in (slice_, *at)]
        numbers = (ctypes.c_int64 * len(flat))(*flat)
        self._plane.ask("fp_slices_go_on", numbers, len(event.rounds))
        return ()

    def _come_after(self, event: CameAfter) -> Sequence[Any]:
        self._plane.ask("fp_came_after", event.step)
        return ()

    # What the plane knows of a slice.
    def _about(self, slice_: int) -> list[int]:
        """Its owner; its last answer's round, and whether that left it unchanged; then what is
        awaited: the answer's step, and the round of the push; -1: nothing.
        """
        seven = (ctypes.c_int64 * 7)(self._slices[slice_].server, -1, 0, 0, -1, -1, 0)
        self._plane.ask("fp_slice", slice_, seven)
        return list(seven)

    def awaits(self, slice_: int, step: int) -> bool:
        return 0 <= slice_ < len(self._slices) and 0 <= step == self._about(slice_)[4]

    def owner_of(self, slice_: int) -> int:
        return self._about(slice_)[0]

    def claim(self, slice_: int) -> Round:
        _, step, again, *_ = self._about(slice_)
        return step, again

    def was_unchanged(self, slice_: int) -> bool:
        return bool(self._about(slice_)[3])

    def is_lost(self, slice_: int, round_: Round) -> bool:
        *_, step, again = self._about(slice_)
        return (step, again) > round_
