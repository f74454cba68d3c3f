"""Which member reads which items of an epoch, when workers leave or join in its middle.

Theory of operation. All ranks draw the same order of items and deal it out in rounds, one item to
each member in turn. When the members change, the rest is dealt anew among those of then: a *deal*.
It must begin with the same batch on all ranks, although they do not talk about it. So it begins
with the first batch that is *drawn* when every rank is certain to know of the change. The ranks run
the same loop: each draws a batch when equally many steps are done. And a worker that has done s + 2
steps has heard from every server who left within step s: it has the values after s + 1, and no
server makes these before it has said so. What a rank knows earlier, by chance, does not count.

A batch belongs to the step under way when it is *asked for*: loaders draw ahead, all ranks' equally
far. A worker that left within step s has read what belongs to s and before. What it had not read
yet is *owed*, and comes first in the new deal. A deal begins with a whole batch, and its last round
is filled up as `session.shares.Turn` does, so that all members have equally many batches.

A worker that joins at step J is a member from the first batch on that is drawn when J steps are
done. Until then, like every rank that is no member, it reads what the first member reads: nothing
is lost by that, and a few of its samples are another's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from foreprop.errors import ConfigError

T = TypeVar("T")

CERTAIN_STEPS = 2
"""How many steps after a worker's last one every rank knows that it has left."""


class MemberChange(NamedTuple):
    """A worker joins at a step, or has left within it: the last one that it pushed anything of."""

    rank: int
    step: int
    joins: bool = False

    def is_certain(self, done: int) -> bool:
        """Whether every rank knows of the change when it has done so many steps."""
        return done >= (self.step if self.joins else self.step + CERTAIN_STEPS)


class Deal(NamedTuple):
    """The rest of the epoch is dealt out among these members, from ``batch`` on.

    ``owed`` names the ranks that have left, each with the first batch that it has not read: these
    ``items`` come first.
    """

    batch: int
    members: tuple[int, ...]
    owed: tuple[tuple[int, int], ...] = ()
    joined: tuple[int, ...] = ()
    items: int = 0


class PassProgress(NamedTuple):
    """How far a pass is: with this and the order, another rank can go on with it.

    ``steps`` are those that the last batches belong to, each as (batch, step).
    """

    given: int
    drawn: int
    ended: bool
    deals: tuple[Deal, ...]
    steps: tuple[tuple[int, int], ...]
    applied: tuple[MemberChange, ...]


class DealtPart(NamedTuple):
    """What one world has read of a pass; another world goes on with the rest (`unread`)."""

    workers: int
    rounds: int
    progress: PassProgress
    left: tuple[MemberChange, ...] = ()
    """All that had left, also those that the progress does not know of yet."""


class DealtEpoch(Generic[T]):
    """One rank's view of one pass; all ranks that make the same calls deal alike. Not thread-safe.

    ``workers`` are the session's at its start; ``changes`` and ``done`` are as in `draw`. So many
    ``rounds`` are dealt at a time as a batch has items.
    """

    def __init__(
        self, workers: int, changes: Sequence[MemberChange], done: int, *, rank: int, rounds: int
    ) -> None:
        self.drawn = 0  # batches
        self.given = 0  # batches
        self.rounds_dealt = 0  # items that each member has had
        self.taken = 0  # items of the order
        self.ended = False
        """A draw has found too little for a batch: there is no other, unless the pass goes on."""
        self._workers = workers
        self._rank = rank
        self._rounds = rounds
        self._applied: set[MemberChange] = set()
        self._steps: dict[int, int] = {}  # by batch that was asked for
        self._recent: dict[int, dict[int, list[T]]] = {}
        """The items of the last batches, by batch and member: what may turn out to be owed."""
        self._beginning: list[T] = []  # of the order, to fill up the last round with
        self._front: deque[T] = deque()  # what is owed, before the order's rest
        _, members = self._certain(done, changes, range(workers))
        self.deals = [Deal(0, members)]
        self._script: deque[Deal] = deque()
        """The other ranks' deals that this one, which joins, has still to repeat."""
        self._scripted = 0  # so many batches the other ranks have drawn
        self._joins = False
        """This rank is not a member yet: what its number has until then was another worker's."""

    @property
    def members(self) -> tuple[int, ...]:
        return self.deals[-1].members

    def count(self, items: int) -> int:
        """How many items this rank has, if the order has so many."""
        left = len(self._front) + max(0, items - self.taken)
        return self.rounds_dealt - (-left // len(self.members))

    # A pass.
    def ask(self, done: int) -> None:
        """Note that the next batch is asked for after so many steps; count it as ``given`` then."""
        self._steps[self.given] = done + 1

    def draw(self, order: Iterator[T], done: int, changes: Sequence[MemberChange]) -> list[T]:
        """The next batch's items, when ``done`` steps are done; none at the end.

        ``changes`` are all that this rank knows of, in the order of their steps.
        """
        while self._script and self._script[0].batch == self.drawn:
            self._deal(self._script.popleft())
        is_live = self.drawn >= self._scripted
        if is_live and self.ended:
            return []
        if is_live:
            self.renew(done, changes)
        items = self._take(order, self._rounds * len(self.members))
        self.ended |= is_live and len(items) <= (self._rounds - 1) * len(self.members)
        if not items:
            return items
        size, batch = len(self.members), self.drawn
        self._recent[batch] = {rank: items[place::size] for place, rank in enumerate(self.members)}
        is_member = self._rank in self.members and not self._joins
        place = self.members.index(self._rank) if is_member else 0
        mine, beyond = items[place::size], len(items) % size
        if 0 < beyond <= place:
            mine.append(self._beginning[(place - beyond) % len(self._beginning)])
        self.drawn += 1
        self.rounds_dealt += -(-len(items) // size)
        if is_live:
            # a change that is still to come is of step ``done`` - 1 or later: nobody owes these
            for old in [each for each in self._recent if self._steps.get(each, done) < done]:
                del self._recent[old], self._steps[old]
        return mine

    def goes_on(self, done: int, changes: Sequence[MemberChange]) -> bool:
        """Whether there is more to draw at the end of the order, because something is owed."""
        self.renew(done, changes)
        self.given = self.drawn  # a last batch that was not whole may have been left out
        self.ended = not self._front
        return not self.ended

    def _take(self, order: Iterator[T], count: int) -> list[T]:
        items = [self._front.popleft() for _ in range(min(count, len(self._front)))]
        from_order = list(islice(order, count - len(items)))
        self.taken += len(from_order)
        items += from_order
        self._beginning += items[: self._workers - len(self._beginning)]
        return items

    # Changes.
    def renew(self, done: int, changes: Sequence[MemberChange]) -> None:
        """Deal anew if there are changes that all ranks know of by now."""
        certain, members = self._certain(done, changes, self.members)
        if not certain:
            return
        owed = [(each.rank, self._first_after(each.step)) for each in certain if not each.joins]
        joined = tuple(each.rank for each in certain if each.joins)
        self._joins = self._joins and self._rank not in joined
        self._deal(Deal(self.drawn, members, tuple(owed), joined))

    def _certain(
        self, done: int, changes: Sequence[MemberChange], members: Sequence[int]
    ) -> tuple[list[MemberChange], tuple[int, ...]]:
        """The new changes that all ranks know of, in the order of steps, and the members then."""
        found, here = [], set(members)
        for change in sorted(changes, key=lambda each: (each.step, each.rank)):
            # a member cannot join, and who is none cannot leave
            known = change in self._applied or (change.rank in here) == change.joins
            if known or not change.is_certain(done):
                continue
            (here.add if change.joins else here.discard)(change.rank)
            found.append(change)
        self._applied |= set(found)
        return found, tuple(sorted(here))

    def _deal(self, deal: Deal) -> None:
        items = self._owed(deal.owed)
        self._front.extendleft(reversed(items))
        self.deals.append(deal._replace(items=len(items)))

    def _first_after(self, step: int) -> int:
        after = [each for each in self._recent if self._steps.get(each, step + 1) > step]
        return min(after, default=self.drawn)

    def _owed(self, owed: Sequence[tuple[int, int]]) -> list[T]:
        """Take what these ranks had not read, batch by batch: from now on nobody owes it."""
        found: list[T] = []
        for batch in sorted(self._recent):
            for rank, first in owed:
                if batch >= first:
                    found += self._recent[batch].pop(rank, ())
        return found

    def write_off(self, change: MemberChange) -> int:
        """How many items of a pass that is over nobody has read, because this worker had left.

        Only batches that the others were given count, and each item counts once.
        """
        if change.joins or change in self._applied:
            return 0
        self._applied.add(change)
        first = self._first_after(change.step)
        for batch in [each for each in self._recent if each >= self.given]:
            del self._recent[batch]
        return len(self._owed([(change.rank, first)]))

    # Going on with what other ranks have begun.
    def progress(self) -> PassProgress:
        steps, applied = tuple(self._steps.items()), tuple(sorted(self._applied))
        return PassProgress(self.given, self.drawn, self.ended, tuple(self.deals), steps, applied)

    def join(self, progress: PassProgress, order: Iterator[T]) -> None:
        """Skip the batches that others were given, and repeat the deals of those they have drawn.

        ``progress`` is any member's before it asks for the first batch of the step that is joined.
        Raises `ConfigError` if the order is too short.
        """
        self._joins = True
        first, *script = progress.deals
        self.deals, self._script = [first], deque(script)
        self._scripted, self.ended = progress.drawn, progress.ended
        self._applied = set(progress.applied)
        while self.drawn < progress.given and self.draw(order, 0, ()):
            pass
        if self.drawn < progress.given:
            raise ConfigError(
                f"the loader ends after {self.drawn} batches of its pass, of which others have read"
                f" {progress.given}: give it the data and the batch size of the others"
            )
        self.given = progress.given
        self._steps = dict.fromkeys(range(self.given), 0) | dict(progress.steps)

    def unread(self, left: Sequence[MemberChange]) -> list[T]:
        """What was dealt to workers that have ``left`` and is not read; to be called after `join`.

        The others have read what they were given. All else is the order's rest.
        """
        new = [each for each in left if not each.joins and each not in self._applied]
        owed = [(each.rank, self._first_after(each.step)) for each in new]
        for deal in self._script:
            owed += deal.owed
        return [*self._owed(owed), *self._front]

    def begin_anew(self) -> None:
        """Count steps from 1 again: what has been asked for belongs to the first."""
        self._steps = dict.fromkeys(self._steps, 1)
        self._applied.clear()


def unread(part: DealtPart, order: Iterator[T]) -> Iterator[T]:
    """The items of ``order`` that nobody has read in ``part``; what is owed comes first.

    Raises `ConfigError` if the order is too short.
    """
    epoch: DealtEpoch[T] = DealtEpoch(part.workers, (), 0, rank=0, rounds=part.rounds)
    epoch.join(part.progress, order)
    yield from epoch.unread(part.left)
    yield from order
