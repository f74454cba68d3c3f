"""Ranks that read one epoch in a training loop, without torch: what `core.dealing` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreprop.core.dealing import DealtEpoch, MemberChange, PassProgress


@dataclass(kw_only=True)
class Loop:
    """What all ranks run: one pass of an epoch."""

    items: int
    workers: int
    rounds: int
    ahead: int = 0
    """Batches that a loader draws ahead."""
    batches_per_step: int = 1
    steps_before: int = 0
    changes: Sequence[MemberChange] = ()
    told: dict[tuple[int, MemberChange], int] = field(default_factory=dict)
    """By rank: so many steps it has done when it hears of a change, if that is early."""
    joined: tuple[int, int] | None = None
    """A rank that joins, and the first step that it takes part in."""

    def known(self, rank: int, done: int) -> list[MemberChange]:
        """By luck, or certainly."""
        heard = [self.told.get((rank, each), done + 1) <= done for each in self.changes]
        certain = [each.is_certain(done) for each in self.changes]
        return [
            each for each, *known in zip(self.changes, heard, certain, strict=True) if any(known)
        ]


class Reader:
    """A rank in this loop, with a loader that draws ahead as torch's does."""

    def __init__(self, loop: Loop, rank: int) -> None:
        self.loop, self.rank = loop, rank
        self.order = iter(range(loop.items))
        self.done = loop.steps_before
        self.epoch: DealtEpoch[int] = DealtEpoch(
            loop.workers, self.known(), self.done, rank=rank, rounds=loop.rounds
        )
        self.read: list[tuple[int, list[int]]] = []
        """The step of each batch, and its items."""
        self.begun: list[list[int]] = []
        """Drawn, and not read."""
        self.progress: PassProgress | None = None
        """When somebody joins."""

    def known(self) -> list[MemberChange]:
        return self.loop.known(self.rank, self.done)

    def prime(self) -> None:
        for _ in range(self.loop.ahead):
            self._draw()

    def _draw(self) -> None:
        if items := self.epoch.draw(self.order, self.done, self.known()):
            self.begun.append(items)

    def next(self) -> list[int]:
        """The next batch, of an epoch that goes on while something is owed; or none."""
        self.epoch.ask(self.done)
        self._draw()
        if not self.begun:
            if not self.epoch.goes_on(self.done, self.known()):
                return []
            self.prime()
            self._draw()
        return self.begun.pop(0)

    def run(self) -> Reader:
        self.prime()
        return self.go_on()

    def go_on(self) -> Reader:
        while True:
            joined = self.loop.joined
            if self.progress is None and joined and self.done + 1 == joined[1]:
                self.progress = self.epoch.progress()
            if not (items := self.next()):
                return self
            self.epoch.given += 1
            self.read.append((self.done + 1, items))
            if len(self.read) % self.loop.batches_per_step == 0:
                self.done += 1

    def until(self, step: int) -> list[int]:
        return [item for at, items in self.read for item in items if at <= step]


def run(loop: Loop) -> dict[int, Reader]:
    return {rank: Reader(loop, rank).run() for rank in range(loop.workers)}


def join(loop: Loop, member: Reader) -> Reader | None:
    """Who joins, with what a member knows at that time; None if the pass has ended before."""
    if loop.joined is None or member.progress is None:
        return None
    rank, step = loop.joined
    reader = Reader(loop, rank)
    reader.done = step - 1
    reader.epoch = DealtEpoch(loop.workers, (), 0, rank=rank, rounds=loop.rounds)
    reader.epoch.join(member.progress, reader.order)
    return reader.run()


def left_within(loop: Loop) -> dict[int, int]:
    return {each.rank: each.step for each in loop.changes if not each.joins}


def all_read(loop: Loop, readers: dict[int, Reader]) -> list[int]:
    """Of survivors all, and of others what belongs to steps that they were in."""
    left = left_within(loop)
    return [
        item for rank, reader in readers.items() for item in reader.until(left.get(rank, 10**9))
    ]
