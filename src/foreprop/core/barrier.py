"""The barrier between the sums of a step and its updates, where updates need the global norm.

Theory of operation. When the gradients of a slice, or of a shard of rows, are summed, its update is
*held*. When all of a server's slices and shards are summed, the server sends its part of the norm
to rank 0. Rank 0 adds up the servers' parts and sends all servers the total; then they update what
they hold, the most urgent slice first. So pushes go on during the backward pass, and replies during
the next forward pass, with only two small frames per server between them.

Where workers may be late or lost, rank 0 may be, too. So all workers get the parts and send the
total there, which is the same to the bit (`core.norm`), and a server takes the first that comes.
Where workers may be in different steps, each push has a norm of its own: its worker adds that up
and sends it.

Rules: every rank pushes every parameter in every step, with a gradient or without, or the barrier
would wait for ever. Rank 0 stays until it has sent the norm of the last step: a session flushes
before it closes. Slices and shards enter the next step only after their update, so at most two
steps are in the barrier: one whose updates are queued, and one that is being summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Literal

from foreprop.core.norm import ZERO, SendNormPart, SquareSum
from foreprop.errors import InternalError, RemoteProtocolError

Tellers = Literal["rank 0", "any", "own"]
"""Who sends a server the norm. ``any``: all workers do, and the first word counts. ``own``: a push
is an update by itself, and its worker sends the norm of that."""


class _SummedStep:
    """The numbers that are summed in one step, or in one worker's where each push has a norm."""

    __slots__ = ("numbers", "part", "step")

    def __init__(self) -> None:
        self.step = 0
        self.numbers: set[int] = set()
        self.part = ZERO


class StepBarrier:
    """A server's side: knows which of its ``members`` are summed, until their norm is known.

    ``members`` is the number of its slices and shards, whose numbers do not collide. What is held
    under a ``whose`` waits together: all of it under 0, or each worker's under its own rank.
    """

    def __init__(self, members: int, *, told_by: Tellers = "rank 0") -> None:
        self.told_by = told_by
        self._members = members
        self._known_step = 0  # the last one whose norm is known
        self._sums: defaultdict[int, _SummedStep] = defaultdict(_SummedStep)  # by `whose`

    def whose(self, rank: int) -> int:
        return rank if self.told_by == "own" else 0

    def hold(self, step: int, number: int, part: SquareSum, whose: int = 0) -> list[SendNormPart]:
        """Note a sum; the last one makes the server's part of the norm due."""
        held = self._sums[whose]
        if held.numbers and step != held.step:
            raise RemoteProtocolError(
                f"slice {number} is at step {step} while others wait for the norm of step"
                f" {held.step}"
            )
        held.step = step
        held.numbers.add(number)
        held.part = held.part.plus(part)
        return [SendNormPart(step, held.part, whose)] if self._is_complete(held) else []

    def _is_complete(self, held: _SummedStep) -> bool:
        return len(held.numbers) == self._members

    def takes(self, rank: int) -> bool:
        """Whether this rank may send the norm."""
        return not rank or self.told_by != "rank 0"

    def has_been_told(self, step: int) -> bool:
        """Whether another worker was first to send the step's norm."""
        return self.told_by == "any" and step <= self._known_step

    def release(self, step: int, whose: int = 0) -> None:
        """Note, once per step, that its norm is known: nothing is held any more.

        Raises `RemoteProtocolError` if it cannot be known yet.
        """
        held = self._sums[whose]
        if not self._members:
            return
        if step != held.step or not self._is_complete(held):
            raise RemoteProtocolError(
                f"the norm of step {step} came while {len(held.numbers)} of {self._members} slices"
                f" of step {held.step} are summed"
            )
        self._known_step = step
        held.numbers.clear()
        held.part = ZERO

    def describe(self, whose: int = 0) -> str:
        """What the barrier waits for, in words."""
        held = self._sums[whose]
        if self._is_complete(held):
            who = {"rank 0": "rank 0 adds", "any": "the workers add", "own": f"rank {whose} adds"}
            return f"the global gradient norm of step {held.step}, which {who[self.told_by]} up"
        return (
            f"the sums of this server's other slices: {len(held.numbers)} of {self._members} are"
            " done"
        )


_Held = tuple[tuple[int, ...], tuple[int, ...] | None]
"""The ``ranks`` and ``counted`` of the update that is held (`core.collect.UpdateSlice`)."""


class HeldSums:
    """The updates that a machine holds at the ``barrier``, if there is one."""

    def __init__(self, barrier: StepBarrier | None) -> None:
        self._barrier = barrier
        self._held: dict[int, dict[int, _Held]] = {}  # by `StepBarrier.whose`, and number

    def __contains__(self, number: int) -> bool:
        return any(number in held for held in self._held.values())

    def hold(
        self,
        number: int,
        step: int,
        ranks: tuple[int, ...],
        counted: tuple[int, ...] | None,
        part: SquareSum,
    ) -> list[SendNormPart]:
        """Hold an update until the step's norm is known. Raises `RemoteProtocolError`."""
        if self._barrier is None:
            raise InternalError(f"slice {number} was summed, but no norm is needed")
        whose = self._barrier.whose(counted[0]) if counted else 0
        parts = self._barrier.hold(step, number, part, whose)
        self._held.setdefault(whose, {})[number] = (ranks, counted)
        return parts

    def release(self, whose: int, *, skip: bool) -> Iterator[tuple[int, _Held]]:
        """The numbers to update now; with ``skip`` by nobody's gradients. Use it up at once."""
        held = self._held.pop(whose, {})
        return ((n, ((), each[1]) if skip else each) for n, each in held.items())

    def describe(self, number: int, missing: Iterable[str]) -> str:
        """What this number waits for, in words, with the first of what is ``missing`` here."""
        whose = next(rank for rank, held in self._held.items() if number in held)
        text = self._barrier.describe(whose) if self._barrier is not None else ""
        return "; ".join([text, *islice(missing, 1)])


OUTSIDE = -1
"""Stands, in a server's place, for the collectives that have parameters which no server has."""


class NormCombiner:
    """A worker's side: adds up the parts of ``servers``, those that own slices or shards.

    `OUTSIDE` may be one of them. With ``from_all`` another worker may be faster to send the norm,
    so that parts of the next step come before the last of this one; and a worker that has joined
    within a step gets some of its parts only.
    """

    def __init__(self, servers: Collection[int], *, from_all: bool = False) -> None:
        self._servers = frozenset(servers)
        self._from_all = from_all
        self._parts: dict[int, dict[int, SquareSum]] = {}  # by step

    def add(self, server: int, step: int, part: SquareSum) -> SquareSum | None:
        """The total, with the last part; raises `RemoteProtocolError` for a part out of turn."""
        if server not in self._servers or server in self._parts.get(step, {}):
            raise RemoteProtocolError(
                f"server {server} sent a part of the norm of step {step}, which is not awaited"
            )
        if not self._from_all and self._parts.keys() - {step}:
            raise RemoteProtocolError(
                f"server {server} sent a part of the norm of step {step} while the parts of step"
                f" {min(self._parts)} come in"
            )
        parts = self._parts.setdefault(step, {})
        parts[server] = part
        if len(parts) < len(self._servers):
            return None
        total = ZERO
        for each in parts.values():  # in any order: the sum is exact
            total = total.plus(each)
        self._parts = {later: each for later, each in self._parts.items() if later > step}
        return total
