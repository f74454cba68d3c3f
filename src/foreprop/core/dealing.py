"""Who reads what of an epoch, when workers leave or join in its middle.

Theory of operation. All ranks draw one order, and deal it out in rounds, one item to each member in
turn. When the members change, what is left is dealt anew: a *deal*, from a batch on that must be
the same for everybody, although nobody asks anybody. So it begins with the first batch that is
*drawn* when every rank is certain to know of the change. The ranks run the same loop: each draws a
batch when equally many steps are done. And a worker that has done s + 2 steps has been told by
every server who has left within step s: it has the values after s + 1, which no server makes before
it has told. What somebody knows earlier, by chance, does not count.

A batch belongs to the step under way when it is *asked for*: loaders draw ahead, and by how much is
the same on all ranks. Who has left within step s has read what belongs to s and before. What it was
still to read comes first in the new deal. A deal begins with a whole batch, and its last round is
filled up as `data.turns.Turn` does, so that all members have equally many batches.

Who joins at step J is a member from the first batch on that is drawn when J steps are done. Until
then, as anybody who is none, it reads what the first member reads: nothing is lost by that, and a
few of its samples are those of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from foreprop.errors import ConfigError

T = TypeVar("T")

CERTAIN_STEPS = 2
"""So many steps after the one that a worker has left within everybody knows of it."""


class MemberChange(NamedTuple):
    """A worker has left within a step, the last one that it has pushed anything of, or joins it."""

    rank: int
    step: int
    joins: bool = False

    def is_certain(self, done: int) -> bool:
        """Whether everybody who has done so many steps knows of it."""
        return done >= (self.step if self.joins else self.step + CERTAIN_STEPS)


class Deal(NamedTuple):
    """From a batch on, the epoch's rest is dealt out among these members."""

    batch: int
    members: tuple[int, ...]
    owed: tuple[tuple[int, int], ...] = ()
    """Ranks that have left: what each was to read from which batch on comes first."""
    joined: tuple[int, ...] = ()
    """Members that are new."""
    items: int = 0
    """So many are owed."""


class PassProgress(NamedTuple):
    """Where a pass is: with the order alone, somebody else can go on with it."""

    given: int
    drawn: int
    ended: bool
    deals: tuple[Deal, ...]
    steps: tuple[tuple[int, int], ...]
    """Of late: batches, and the steps that they belong to."""
    applied: tuple[MemberChange, ...]


class DealtPart(NamedTuple):
    """What a world has read of a pass: another one goes on with what it leaves (`unread`)."""

    workers: int
    rounds: int
    progress: PassProgress
    left: tuple[MemberChange, ...] = ()
    """Workers that had left, whether they knew it by then or not."""


class DealtEpoch(Generic[T]):
    """One rank's view of one pass; all ranks that make the same calls deal alike. Not thread-safe.

    ``workers`` are the session's at its start; ``changes`` and ``done`` as in `draw`. ``rounds``
    are dealt at a time: as many items as a batch has.
    """

    def __init__(
        self, workers: int, changes: Sequence[MemberChange], done: int, *, rank: int, rounds: int
    ) -> None:
        self.drawn = 0
        """Batches that have been drawn."""
        self.given = 0
        """Batches that have been given out."""
        self.rounds_dealt = 0
        """Items that each member has had."""
        self.taken = 0
        """Items of the order that have been dealt."""
        self.ended = False
        """A draw has found too little for a batch: there is no other, unless the pass goes on."""
        self._workers = workers
        self._rank = rank
        self._rounds = rounds
        self._applied: set[MemberChange] = set()
        self._steps: dict[int, int] = {}
        """By batch that has been asked for: its step."""
        self._kept: dict[int, dict[int, list[T]]] = {}
        """By batch, of late: what each member was to read."""
        self._beginning: list[T] = []
        self._front: deque[T] = deque()
        """What is owed, before the order's rest."""
        _, members = self._certain(done, changes, range(workers))
        self.deals = [Deal(0, members)]
        self._script: deque[Deal] = deque()
        """Deals of others that are still to be made again."""
        self._scripted = 0
        """So many batches others have drawn."""
        self._joins = False
        """Whether it is to be a member: what its rank has until then was another worker's."""

    @property
    def members(self) -> tuple[int, ...]:
        """Among whom is dealt now."""
        return self.deals[-1].members

    def count(self, items: int) -> int:
        """Of this rank, if the order has so many."""
        left = len(self._front) + max(0, items - self.taken)
        return self.rounds_dealt - (-left // len(self.members))

    # A pass.
    def ask(self, done: int) -> None:
        """The next batch is asked for when so many steps are done; count it as ``given`` then."""
        self._steps[self.given] = done + 1

    def draw(self, order: Iterator[T], done: int, changes: Sequence[MemberChange]) -> list[T]:
        """The next batch's items; none at the end. ``done``: steps that are done.

        ``changes``: all that this rank knows of, in the order of their steps.
        """
        self._follow()
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
        self._kept[batch] = {rank: items[place::size] for place, rank in enumerate(self.members)}
        is_member = self._rank in self.members and not self._joins
        place = self.members.index(self._rank) if is_member else 0
        mine, beyond = items[place::size], len(items) % size
        if 0 < beyond <= place:
            mine.append(self._beginning[(place - beyond) % len(self._beginning)])
        self.drawn += 1
        self.rounds_dealt += -(-len(items) // size)
        if is_live:
            self._forget(done)
        return mine

    def goes_on(self, done: int, changes: Sequence[MemberChange]) -> bool:
        """At the end of the order: whether something is owed by now, and to be drawn."""
        self.renew(done, changes)
        self.given = self.drawn  # a last batch that was not whole may have been left out
        self.ended = not self._front
        return not self.ended

    def _take(self, order: Iterator[T], count: int) -> list[T]:
        items = [self._front.popleft() for _ in range(min(count, len(self._front)))]
        fresh = list(islice(order, count - len(items)))
        self.taken += len(fresh)
        items += fresh
        self._beginning += items[: self._workers - len(self._beginning)]
        return items

    def _forget(self, done: int) -> None:
        """What nobody can be found to owe any more: a change yet to come is of ``done`` - 1 on."""
        for batch in [each for each in self._kept if self._steps.get(each, done) < done]:
            del self._kept[batch], self._steps[batch]

    # Changes.
    def renew(self, done: int, changes: Sequence[MemberChange]) -> None:
        """Deal anew if there are changes of which all know by now."""
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
        """In the order of steps, and the members after them. Nobody joins who is here."""
        found, here = [], set(members)
        for change in sorted(changes, key=lambda each: (each.step, each.rank)):
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
        """The first batch that belongs to a later step."""
        after = [each for each in self._kept if self._steps.get(each, step + 1) > step]
        return min(after, default=self.drawn)

    def _owed(self, owed: Sequence[tuple[int, int]]) -> list[T]:
        """What these ranks were to read, batch by batch; nobody owes it from now on."""
        found: list[T] = []
        for batch in sorted(self._kept):
            for rank, first in owed:
                if batch >= first:
                    found += self._kept[batch].pop(rank, ())
        return found

    def write_off(self, change: MemberChange) -> int:
        """Of a pass that is over: items that are in no step, for this worker had left by then.

        That is of the batches that others were given. Once written off they are no more.
        """
        if change.joins or change in self._applied:
            return 0
        self._applied.add(change)
        first = self._first_after(change.step)
        for batch in [each for each in self._kept if each >= self.given]:
            del self._kept[batch]
        return len(self._owed([(change.rank, first)]))

    # Going on with what others have begun.
    def progress(self) -> PassProgress:
        """Between two batches."""
        steps, applied = tuple(self._steps.items()), tuple(sorted(self._applied))
        return PassProgress(self.given, self.drawn, self.ended, tuple(self.deals), steps, applied)

    def join(self, progress: PassProgress, order: Iterator[T]) -> None:
        """Draw for nobody what others have been given; what they have drawn is drawn as it was.

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
        """After `join`: what was dealt to workers that have left, and they have not read.

        The others have read what they were given. All else is the order's rest.
        """
        fresh = [each for each in left if not each.joins and each not in self._applied]
        owed = [(each.rank, self._first_after(each.step)) for each in fresh]
        for deal in self._script:
            owed += deal.owed
        return [*self._owed(owed), *self._front]

    def _follow(self) -> None:
        while self._script and self._script[0].batch == self.drawn:
            self._deal(self._script.popleft())

    def begin_anew(self) -> None:
        """Steps are counted from 1 again: what has been asked for belongs to the first."""
        self._steps = dict.fromkeys(self._steps, 1)
        self._applied.clear()


def unread(part: DealtPart, order: Iterator[T]) -> Iterator[T]:
    """What nobody has read of an order of which a part is dealt: what is owed comes first.

    Raises `ConfigError` if the order is too short.
    """
    epoch: DealtEpoch[T] = DealtEpoch(part.workers, (), 0, rank=0, rounds=part.rounds)
    epoch.join(part.progress, order)
    yield from epoch.unread(part.left)
    yield from order
