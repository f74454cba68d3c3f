"""A loader's passes, dealt anew among those who are here when workers of a session have left.

`core.dealing` decides, and `elastic.attendance` knows who is here. A pass that ends while something
is owed goes on: its loader is begun once more, and draws that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from foreprop.cluster.world import World
from foreprop.config import LOGGER
from foreprop.core.dealing import Deal, DealtEpoch, MemberChange, PassProgress
from foreprop.data.shares import SharedOrder
from foreprop.elastic.attendance import Attendance, maybe_attendance
from foreprop.elastic.positions import PassPosition
from foreprop.quantities import counted

_REMEMBERED = 8
"""Passes that have ended: who has left in their last steps comes to be known later."""


def maybe_why_not(loader: Any, share: object, attendance: Attendance) -> str | None:
    """Why this loader's passes cannot be dealt anew, if so."""
    if not isinstance(share, SharedOrder):
        return "it is read in order, or is divided by somebody else"
    if type(loader).__iter__ is not DataLoader.__iter__ or not _draws_once(loader, share):
        return "it draws its batches in a way of its own"
    if not attendance.is_training_thread:
        return "another thread reads it than makes the steps"
    return None


def _draws_once(loader: Any, share: SharedOrder) -> bool:
    """Whether each batch that the loader gives out is drawn once, and in this order."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler is share
    return batches is share or (type(batches) is BatchSampler and batches.sampler is share)


class Redealing:
    """Of one loader: what it knows of its passes."""

    def __init__(self, share: object, world: World, name: str) -> None:
        self._share = share
        self._world = world
        self.workers = world.size
        self.name = name
        self._heard: weakref.WeakSet[Attendance] = weakref.WeakSet()
        self._refused: str | None = None
        self._lock = threading.RLock()  # an abandoned pass may end wherever garbage is collected
        self._ended: list[tuple[int, DealtEpoch[Any]]] = []
        """With their epochs' numbers."""
        check = share.check if isinstance(share, SharedOrder) else None
        self._loader_number = None if check is None else check.number
        self._underway: weakref.ref[DealtPass] | None = None
        self._joined: PassPosition | None = None
        """Of a newcomer: where its next pass begins."""
        self._has_said_so = False
        self._caught_up: weakref.WeakSet[Attendance] = weakref.WeakSet()

    def passed(self, loader: Any, attendance: Attendance) -> Iterator[Any]:
        """The batches of one pass."""
        self.hear(attendance)
        share = self._share
        self._refused = maybe_why_not(loader, share, attendance)
        if self._refused is not None or not isinstance(share, SharedOrder):
            self._say_that_it_begins(attendance)
            return iter(loader)
        self.catch_up(attendance)
        joined, self._joined = self._joined, None
        progress = None if joined is None else joined.progress
        if joined is not None and joined.epoch != share.epoch:
            LOGGER.warning(
                "rank %d begins epoch %d of a %s, as set_epoch() says; the others are in epoch %d",
                *(attendance.rank, share.epoch, self.name, joined.epoch),
            )
            progress = None
        found = DealtPass(self, share, self._world, attendance, progress)
        self._underway = weakref.ref(found)
        return found.batches(lambda: iter(loader))

    def _say_that_it_begins(self, attendance: Attendance) -> None:
        """A newcomer's loader."""
        if attendance.is_newcomer and not self._has_said_so:
            self._has_said_so = True
            LOGGER.warning(
                "rank %d has joined and begins a pass of its own of a %s, as set_epoch() says: %s",
                *(attendance.rank, self.name, self._refused),
            )

    # A newcomer, and what others tell it.
    def catch_up(self, attendance: Attendance) -> None:
        """Of a newcomer's loader, once: the next pass is the one that the others are in."""
        share, number = self._share, self._loader_number
        if not attendance.is_newcomer or attendance in self._caught_up:
            return
        if number is None or not isinstance(share, SharedOrder):
            return
        self._joined = attendance.position_of(number)
        self._caught_up.add(attendance)
        share.check = None  # rank 0's order may have gone with it
        if self._joined is not None:
            share.set_epoch(self._joined.epoch)

    def forget_joined(self) -> None:
        """Of a newcomer's loader: the others have ended the pass that they were in."""
        self._joined = None

    def where(self) -> tuple[int, PassProgress | None] | None:
        """The epoch of the pass under way, or of the next one, and how far that is."""
        if self._refused is not None:
            return None
        underway = None if self._underway is None else self._underway()
        if underway is not None and not underway.is_over:
            return underway.number, underway.progress()
        return getattr(self._share, "epoch", 0), None

    def hear(self, attendance: Attendance) -> None:
        """Be told who leaves."""
        if attendance in self._heard:
            return
        self._heard.add(attendance)
        if self._loader_number is not None:
            attendance.keep_loader(self._loader_number, self.where)
        alive = weakref.ref(self)

        def tell(change: MemberChange, members: Sequence[int]) -> None:
            if (found := alive()) is not None and not change.joins:
                found._report(attendance, change.step)

        attendance.on_membership.append(tell)

    def _report(self, attendance: Attendance, step: int) -> None:
        """Any thread."""
        if self._refused is not None and attendance.rank == attendance.members[0]:
            LOGGER.warning(
                "what a worker that has left within step %d was still to read of a %s is not seen,"
                " and its part is missing in each later pass: %s",
                *(step, self.name, self._refused),
            )
        self.write_off(attendance)

    def ended(self, number: int, epoch: DealtEpoch[Any], attendance: Attendance) -> None:
        """A pass is over."""
        with self._lock:
            self._ended = [*self._ended, (number, epoch)][-_REMEMBERED:]
        self.write_off(attendance)

    def write_off(self, attendance: Attendance) -> None:
        """Say what passes that are over have lost. Any thread."""
        changes = attendance.known()
        with self._lock:
            lost = [
                (number, change, count)
                for number, epoch in self._ended
                for change in changes
                if (count := epoch.write_off(change))
            ]
        for number, change, count in lost if attendance.rank == attendance.members[0] else ():
            LOGGER.warning(
                "epoch %d of a %s had ended when rank %d was known to have left within step %d:"
                " %d of its samples are not seen",
                *(number, self.name, change.rank, change.step, count),
            )


class DealtPass:
    """One pass of a loader. The thread that trains."""

    def __init__(
        self,
        owner: Redealing,
        share: SharedOrder,
        world: World,
        attendance: Attendance,
        joins_at: PassProgress | None = None,
    ) -> None:
        """``joins_at``: how far others are that have begun it."""
        self.begun = False
        """Whether the order is being drawn: then a loader that begins again goes on with it."""
        self._owner = owner
        self._share = share
        self._world = world
        self._attendance = attendance
        self.number = share.epoch
        self.is_over = False
        self._joins_at = joins_at
        self._order: Iterator[Any]
        self._drawing: AbstractContextManager[object]
        changes = attendance.changes()
        self._epoch: DealtEpoch[Any] = DealtEpoch(
            attendance.started,
            changes,
            attendance.done,
            rank=world.rank,
            rounds=share.turn.rounds,
        )

    def count(self, items: int) -> int:
        """Of this rank, if the order has so many, and nobody else leaves."""
        return self._epoch.count(items)

    def progress(self) -> PassProgress:
        """Between two batches."""
        return self._epoch.progress()

    def batches(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """What the loader gives, and after its end what others have left."""
        share, epoch = self._share, self._epoch
        share.dealing = self
        try:
            batches = begin()
            while True:
                epoch.ask(self._present().done)
                try:
                    batch = next(batches)
                except StopIteration:
                    if not self._goes_on():
                        return
                    share.dealing = self
                    batches = begin()
                    continue
                epoch.given += 1
                yield batch
        finally:
            self.is_over = True
            if share.dealing is self:
                share.dealing = None
            share.divide_among(epoch.members)
            self._owner.ended(self.number, epoch, self._attendance)

    def _present(self) -> Attendance:
        """Of the session's present connection: the first step may make another one."""
        found = maybe_attendance(self._world) or self._attendance
        if found is not self._attendance:
            self._attendance = found
            self._owner.hear(found)
            self._epoch.begin_anew()
        return found

    def _goes_on(self) -> bool:
        attendance, before = self._present(), len(self._epoch.deals)
        goes_on = self._epoch.goes_on(attendance.done, attendance.changes())
        self._report_deals(before)
        return goes_on

    # What the sampler asks.
    def deal(self, order: Iterator[Any], drawing: AbstractContextManager[object]) -> Iterator[Any]:
        """This rank's items; they are drawn inside of ``drawing``, and given out outside."""
        self.begun = True
        self._order, self._drawing = order, drawing
        if self._joins_at is not None:
            with drawing:
                self._epoch.join(self._joins_at, order)
            self._epoch.ask(self._present().done)
        return self.rest()

    def rest(self) -> Iterator[Any]:
        """Those that are left."""
        while items := self._draw():
            yield from items

    def _draw(self) -> list[Any]:
        attendance, before = self._present(), len(self._epoch.deals)
        changes = attendance.changes()
        with self._drawing:
            items = self._epoch.draw(self._order, attendance.done, changes)
        self._report_deals(before)
        return items

    def _report_deals(self, before: int) -> None:
        """Those since there were so many."""
        for deal in self._epoch.deals[before:]:
            if self._world.rank == deal.members[0]:
                LOGGER.warning(
                    "epoch %d of a %s is dealt out anew among rank %s, from batch %d on: %s",
                    *(self.number, self._owner.name, ", ".join(map(str, deal.members))),
                    *(deal.batch, _why(deal)),
                )


def _why(deal: Deal) -> str:
    """In words."""
    why = [f"rank {rank} has joined" for rank in deal.joined]
    if deal.owed:
        ranks = ", ".join(str(rank) for rank, _ in deal.owed)
        why.append(f"{counted(deal.items, 'sample')} first that rank {ranks} was still to read")
    return "; ".join(why)
