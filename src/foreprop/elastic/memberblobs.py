"""A member's buffers and frozen parameters, for who joins: as they are when its first step begins.

Of the lowest rank that was here before. Its frozen parameters leave when it hears of the newcomer,
its buffers when it has ended the step before the newcomer's first one; both with the lowest
priority. Every member keeps a copy of its buffers from then on, until it has ended the step after
that first one. It does so with values that count the newcomer, which by then has all. If the lowest
rank is lost meanwhile the next one sends its own. A server passes on the first that comes.

Buffers are small: averages of activations. Frozen parameters are sent as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from foreprop.core.frames import CONTROL_PRIORITY, LAST_PRIORITY
from foreprop.core.manifest import BUFFERS_BLOB, FROZEN_BLOB
from foreprop.core.membership import Members
from foreprop.core.wire import Header, Kind
from foreprop.hooks.modelhooks import ModelBuffers, pack
from foreprop.link.connection import Connection
from foreprop.path.calls import Blobs
from foreprop.path.memory import bytes_of
from foreprop.path.worker import WorkerEngine


class GivenBlobs:
    """On a member. ``members`` are the ranks that are here, with the first steps of newcomers."""

    def __init__(
        self,
        engine: WorkerEngine,
        members: Callable[[], Mapping[int, int]],
        buffers: ModelBuffers,
        frozen: Sequence[torch.Tensor],
    ) -> None:
        self.has_own = engine.config.join is None
        """Whether what it has is the session's: a newcomer gets it first."""
        self._engine = engine
        self._members = members
        self._buffers = buffers
        self._frozen = frozen
        self._coming: dict[int, int] = {}
        """By rank, until this one has ended the step after it: its first step."""
        self._packed: dict[int, bytes] = {}
        """The buffers, by the first step that they are for."""
        self._given: set[int] = set()
        """The first steps for which this rank's frozen parameters have left."""

    @property
    def _carrier(self) -> int:
        """The server by which they go. It has slices, so it has told of a newcomer before the step
        before its first one can end."""
        machine = self._engine.machine
        return min((machine.owner_of(piece.number) for piece in self._engine.slices), default=0)

    # In receiving threads.
    def hear_joined(self, rank: int, server: int, step: int) -> None:
        """A server counts a rank from this step on."""
        with self._engine.lock:
            if server == self._carrier and step > self._engine.steps:
                self._coming[rank] = step
                self._given.discard(step)  # another one may come at the same step
                self._give()

    def hear_left(self, rank: int) -> None:
        """Whoever is the lowest rank now sends what the one before may not have sent."""
        with self._engine.lock:
            self._coming.pop(rank, None)
            self.give_again()

    def give_again(self) -> None:
        """A server is lost, too, or who was to give."""
        with self._engine.lock:
            self._given.clear()
            self._give(anew=True)

    # In the training thread.
    def end_step(self, done: int) -> None:
        with self._engine.lock:
            if not self._coming:
                return
            self._coming = {rank: step for rank, step in self._coming.items() if step >= done}
            self._packed = {step: data for step, data in self._packed.items() if step >= done}
            self._given = {step for step in self._given if step >= done}
            if done + 1 in self._coming.values():
                self._pack(done + 1)
                self._give(anew=True)

    def end(self, coming: Collection[int]) -> None:
        """This member ends before these first steps of others: whoever does gives them all."""
        with self._engine.lock:
            for first in sorted(set(coming)) if self.has_own else ():
                self._pack(first)
                self._given.discard(first)
                for server in range(len(self._engine.connections)):
                    self._send(server, first)  # not all of them may count the newcomer yet

    def _pack(self, first: int) -> None:
        if len(self._buffers):
            self._buffers.check_size()
            self._packed[first] = pack(self._buffers.now())

    def _give(self, *, anew: bool = False) -> None:
        """What is on this rank, the lowest one that was here before; ``anew``: buffers, too."""
        members = self._members()
        for first in sorted(set(self._coming.values())):
            here = (rank for rank, since in members.items() if since < first)
            if self.has_own and self._engine.rank == min(here, default=-1):
                self._send(self._carrier, first, buffers=anew)
                self._given.add(first)

    def _send(self, server: int, first: int, *, buffers: bool = True) -> None:
        blobs: dict[int, bytes | memoryview] = {}
        if first not in self._given:
            blobs |= enumerate(map(_bytes_of, self._frozen), FROZEN_BLOB)
        if buffers and first in self._packed:
            blobs[BUFFERS_BLOB] = self._packed[first]
        for which, data in blobs.items():
            self._engine.executor.send(server, Kind.BLOB, first - 1, LAST_PRIORITY, which, data)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().contiguous())


class NewcomersBlobs:
    """Owns blobs, on a server: rank 0's of the start, and members' for newcomers."""

    kinds = Blobs.kinds

    def __init__(self, inner: Blobs, members: Members) -> None:
        self._inner = inner
        self._members = members
        self._executor = inner.executor
        self._passed: dict[tuple[int, int], int] = {}
        """By newcomer and number of the blob: its first step."""

    def room(self, peer: Connection, header: Header) -> memoryview:
        return self._inner.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BLOB_PULL or header.step == 0:
            self._inner.on_frame(peer, header, payload)
            return
        first, which = header.step + 1, header.slice
        with self._executor.lock:
            if not self._members.had_values_before(peer.number, first):
                return
            for rank in self._members.coming_at(first):
                if self._passed.get((rank, which)) != first:
                    self._passed[rank, which] = first
                    about = (Kind.BLOB_REPLY, header.step, CONTROL_PRIORITY, which)
                    self._executor.send(rank, *about, payload)
