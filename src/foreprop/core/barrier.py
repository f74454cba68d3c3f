"""The barrier between the sums of a step and its updates, when these need the global norm.

Theory of operation. A server's slice, or shard of rows, whose gradients have been summed is *held*.
When all that the server has are, its part of the norm goes to rank 0, which adds up the servers'
parts and tells all of them the total; then what is held is updated, the most urgent slice first. So
pushes go on during the backward pass, and replies during the next forward pass; between are only
two small frames per server. One barrier is shared by a server's two state machines, of slices and
of rows; what it lets go of, each of them knows itself.

Rules: every rank pushes every parameter in every step, with a gradient or without, or the barrier
would wait for ever. Rank 0 stays until it has told the norm of the last step: a session flushes
before it closes. Slices and shards enter the next step only after their update, so at most two
steps are in the barrier: one whose updates are queued, and one that is being summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from foreprop.core.frames import SendNormPart
from foreprop.core.norm import ZERO, SquareSum
from foreprop.errors import InternalError, RemoteProtocolError


class StepBarrier:
    """A server's side: holds summed slices and shards until the norm of their step is known.

    ``members`` is how many there are; their numbers do not collide.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._step = 0  # of what is held
        self._held: set[int] = set()
        self._part = ZERO

    def hold(self, step: int, number: int, part: SquareSum) -> list[SendNormPart]:
        """Take a summed slice or shard; with the last one the server's part of the norm is due."""
        if self._held and step != self._step:
            raise RemoteProtocolError(
                f"slice {number} is at step {step} while others wait for the norm of step"
                f" {self._step}"
            )
        self._step = step
        self._held.add(number)
        self._part = self._part.plus(part)
        return [SendNormPart(step, self._part)] if self._is_complete else []

    @property
    def _is_complete(self) -> bool:
        return len(self._held) == self._members

    def release(self, step: int) -> None:
        """The norm of this step is known: nothing is held any more. Once per step.

        Raises `RemoteProtocolError` if it cannot be known yet.
        """
        if not self._members:
            return
        if step != self._step or not self._is_complete:
            raise RemoteProtocolError(
                f"the norm of step {step} came while {len(self._held)} of {self._members} slices of"
                f" step {self._step} are summed"
            )
        self._held.clear()
        self._part = ZERO

    def holds(self, number: int) -> bool:
        return number in self._held

    def describe(self) -> str:
        """What it waits for, in words."""
        if self._is_complete:
            return f"the global gradient norm of step {self._step}, which rank 0 adds up"
        return (
            f"the sums of this server's other slices: {len(self._held)} of {self._members} are done"
        )


class HeldSums:
    """One machine's part: what it has summed and holds at the ``barrier``, if there is one."""

    def __init__(self, barrier: StepBarrier | None, noun: str) -> None:
        """``noun``: what is held, in messages."""
        self._barrier = barrier
        self._noun = noun
        self._held: dict[int, tuple[int, ...]] = {}  # by number: whose gradients

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def hold(
        self, number: int, step: int, ranks: tuple[int, ...], part: SquareSum
    ) -> list[SendNormPart]:
        """Until the step's norm is known. Raises `RemoteProtocolError`."""
        if self._barrier is None:
            raise InternalError(f"{self._noun} {number} was summed, but no norm is needed")
        told = self._barrier.hold(step, number, part)
        self._held[number] = ranks
        return told

    def release(self, *, skip: bool) -> Iterator[tuple[int, tuple[int, ...]]]:
        """What is to be updated now, and by whose gradients; to be used up at once."""
        held, self._held = self._held, {}
        return ((number, () if skip else ranks) for number, ranks in held.items())

    def describe(self, missing: Iterable[str]) -> str:
        """What the barrier waits for, in words, with the first of what is ``missing`` here."""
        text = self._barrier.describe() if self._barrier is not None else ""
        return "; ".join([text, *islice(missing, 1)])


OUTSIDE = -1
"""In the place of a server: the part of parameters that no server has, but collectives."""


class NormCombiner:
    """Rank 0's side: adds up the parts of ``servers``, those that own slices or shards.

    `OUTSIDE` may be one of them.
    """

    def __init__(self, servers: Collection[int]) -> None:
        self._servers = frozenset(servers)
        self._step = 0
        self._parts: dict[int, SquareSum] = {}

    def add(self, server: int, step: int, part: SquareSum) -> SquareSum | None:
        """The total, with the last part; raises `RemoteProtocolError`."""
        if server not in self._servers or server in self._parts:
            raise RemoteProtocolError(
                f"server {server} sent a part of the norm of step {step}, which is not awaited"
            )
        if self._parts and step != self._step:
            raise RemoteProtocolError(
                f"server {server} sent a part of the norm of step {step} while the parts of step"
                f" {self._step} come in"
            )
        self._step = step
        self._parts[server] = part
        if len(self._parts) < len(self._servers):
            return None
        total = ZERO
        for each in self._parts.values():  # in any order: the sum is exact
            total = total.plus(each)
        self._parts.clear()
        return total

    @property
    def missing(self) -> list[int]:
        """The servers whose parts of the step under way are not in."""
        return sorted(self._servers - self._parts.keys())
