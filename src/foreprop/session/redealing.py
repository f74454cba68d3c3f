"""A loader's passes, dealt anew among the members when workers of a session leave or join.

`core.dealing` decides, and `members.membershipview` knows who the members are. A pass that ends
while something is owed of what somebody left goes on: its loader is begun once more, and draws
that. A newcomer's loader begins with the pass that the others are in, where they are. What is lost,
because a pass had ended when a loss became known, or because a loader cannot be dealt anew, is
logged.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from foreprop.config import LOGGER
from foreprop.core.dealing import DealtEpoch, MemberChange, PassProgress
from foreprop.engine.world import World
from foreprop.features.members.membershipview import MembershipView, maybe_view
from foreprop.features.members.messages import PassPosition
from foreprop.quantities import counted
from foreprop.session.shares import Dealing, SharedOrder

_REMEMBERED = 8
"""So many passes that have ended are kept: a loss in their last steps becomes known later."""


def maybe_why_not(loader: Any, share: object, view: MembershipView) -> str | None:
    """Why this loader's passes cannot be dealt anew, if so."""
    if not isinstance(share, SharedOrder):
        return "it is read in order, or is divided by somebody else"
    draws_in_order = type(loader).__iter__ is DataLoader.__iter__
    if draws_in_order:  # and each batch that it gives out is drawn once
        batches = loader.batch_sampler
        of_torch = type(batches) is BatchSampler and batches.sampler is share
        own_order = loader.sampler is share if batches is None else batches is share
        draws_in_order = own_order or of_torch
    if not draws_in_order:
        return "it draws its batches in a way of its own"
    if not view.is_training_thread:
        return "another thread reads it than makes the steps"
    return None


class Redealing:
    """What is known of one loader's passes."""

    def __init__(self, share: object, world: World, name: str) -> None:
        self._share = share
        self._world = world
        self.workers = world.size
        self.name = name
        self._heard: weakref.WeakSet[MembershipView] = weakref.WeakSet()
        self._refused: str | None = None
        self._lock = threading.RLock()  # an abandoned pass may end wherever garbage is collected
        self._ended: list[tuple[int, DealtEpoch[Any]]] = []  # with the epochs' numbers
        check = share.check if isinstance(share, SharedOrder) else None
        self._loader_number = None if check is None else check.number
        self._underway: weakref.ref[DealtPass] | None = None
        self.joined: PassPosition | None = None
        """Where a newcomer's next pass begins, unless the others have ended that pass since."""
        self._has_said_so = False
        self._caught_up: weakref.WeakSet[MembershipView] = weakref.WeakSet()

    def passed(self, loader: Any, view: MembershipView) -> Iterator[Any]:
        self.hear(view)
        share = self._share
        self._refused = maybe_why_not(loader, share, view)
        if self._refused is not None or not isinstance(share, SharedOrder):
            if view.is_newcomer and not self._has_said_so:
                self._has_said_so = True
                LOGGER.warning(
                    "rank %d has joined and begins a pass of its own of a %s, as set_epoch()"
                    " says: %s",
                    *(view.rank, self.name, self._refused),
                )
            return iter(loader)
        self.catch_up(view)
        joined, self.joined = self.joined, None
        progress = None if joined is None else joined.progress
        if joined is not None and joined.epoch != share.epoch:
            LOGGER.warning(
                "rank %d begins epoch %d of a %s, as set_epoch() says; the others are in epoch %d",
                *(view.rank, share.epoch, self.name, joined.epoch),
            )
            progress = None
        found = DealtPass(self, share, self._world, view, progress)
        self._underway = weakref.ref(found)
        return found.batches(lambda: iter(loader))

    def catch_up(self, view: MembershipView) -> None:
        """Have a newcomer's loader begin with the pass that the others are in, the first time."""
        share, number = self._share, self._loader_number
        if not view.is_newcomer or view in self._caught_up:
            return
        if number is None or not isinstance(share, SharedOrder):
            return
        self.joined = view.position_of(number)
        self._caught_up.add(view)
        share.check = None  # rank 0's order may have gone with it
        if self.joined is not None:
            share.set_epoch(self.joined.epoch)

    def where(self) -> tuple[int, PassProgress | None] | None:
        """The epoch of the pass under way, or of the next one, and how far that is."""
        if self._refused is not None:
            return None
        underway = None if self._underway is None else self._underway()
        if underway is not None and not underway.is_over:
            return underway.number, underway.progress()
        return getattr(self._share, "epoch", 0), None

    def hear(self, view: MembershipView) -> None:
        """Have the view report who leaves, and ask where this loader is."""
        if view in self._heard:
            return
        self._heard.add(view)
        if self._loader_number is not None:
            view.keep_loader(self._loader_number, self.where)
        alive = weakref.ref(self)

        def tell(change: MemberChange, members: Sequence[int]) -> None:
            if (found := alive()) is not None and not change.joins:
                found._report(view, change.step)

        view.on_membership.append(tell)

    def _report(self, view: MembershipView, step: int) -> None:
        if self._refused is not None and view.rank == view.members[0]:
            LOGGER.warning(
                "what a worker that has left within step %d was still to read of a %s is not seen,"
                " and its part is missing in each later pass: %s",
                *(step, self.name, self._refused),
            )
        self.write_off(view)

    def ended(self, number: int, epoch: DealtEpoch[Any], view: MembershipView) -> None:
        """Note that a pass is over."""
        with self._lock:
            self._ended = [*self._ended, (number, epoch)][-_REMEMBERED:]
        self.write_off(view)

    def write_off(self, view: MembershipView) -> None:
        """Log what passes that are over have lost. Any thread."""
        changes = view.known()
        with self._lock:
            lost = [
                (number, change, count)
                for number, epoch in self._ended
                for change in changes
                if (count := epoch.write_off(change))
            ]
        for number, change, count in lost if view.rank == view.members[0] else ():
            LOGGER.warning(
                "epoch %d of a %s had ended when rank %d was known to have left within step %d:"
                " %d of its samples are not seen",
                *(number, self.name, change.rank, change.step, count),
            )


class DealtPass(Dealing):
    """One pass of a loader. Training thread.

    ``joins_at``: how far the others are that have begun it.
    """

    def __init__(
        self,
        owner: Redealing,
        share: SharedOrder,
        world: World,
        view: MembershipView,
        joins_at: PassProgress | None = None,
    ) -> None:
        self._owner = owner
        self._share = share
        self._world = world
        self._view = view
        self.number = share.epoch
        self.is_over = False
        self._joins_at = joins_at
        self._order: Iterator[Any]
        self._drawing: AbstractContextManager[object]
        self._epoch: DealtEpoch[Any] = DealtEpoch(
            view.started, view.changes(), view.done, rank=world.rank, rounds=share.turn.rounds
        )

    def count(self, items: int) -> int:
        return self._epoch.count(items)

    def progress(self) -> PassProgress:
        """How far the pass is, between two batches."""
        return self._epoch.progress()

    def batches(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The loader's batches, and after its end those that others have left."""
        share, epoch = self._share, self._epoch
        share.dealing = self
        try:
            batches = begin()
            while True:
                epoch.ask(self._present().done)
                try:
                    batch = next(batches)
                except StopIteration:
                    view, before = self._present(), len(epoch.deals)
                    goes_on = epoch.goes_on(view.done, view.changes())
                    self._report_deals(before)
                    if not goes_on:
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
            self._owner.ended(self.number, epoch, self._view)

    def _present(self) -> MembershipView:
        # the first step may have connected the session anew
        found = maybe_view(self._world) or self._view
        if found is not self._view:
            self._view = found
            self._owner.hear(found)
            self._epoch.begin_anew()
        return found

    def deal(self, items: Iterator[Any], drawing: AbstractContextManager[object]) -> Iterator[Any]:
        self.begun = True
        self._order, self._drawing = items, drawing
        if self._joins_at is not None:
            with drawing:
                self._epoch.join(self._joins_at, items)
            self._epoch.ask(self._present().done)
        return self.rest()

    def rest(self) -> Iterator[Any]:
        while True:
            view, before = self._present(), len(self._epoch.deals)
            changes = view.changes()
            with self._drawing:
                items = self._epoch.draw(self._order, view.done, changes)
            self._report_deals(before)
            if not items:
                return
            yield from items

    def _report_deals(self, before: int) -> None:
        for deal in self._epoch.deals[before:]:
            if self._world.rank == deal.members[0]:
                why = [f"rank {rank} has joined" for rank in deal.joined]
                if deal.owed:
                    ranks = ", ".join(str(rank) for rank, _ in deal.owed)
                    owed = counted(deal.items, "sample")
                    why.append(f"{owed} first that rank {ranks} was still to read")
                LOGGER.warning(
                    "epoch %d of a %s is dealt out anew among rank %s, from batch %d on: %s",
                    *(self.number, self._owner.name, ", ".join(map(str, deal.members))),
                    *(deal.batch, "; ".join(why)),
                )
