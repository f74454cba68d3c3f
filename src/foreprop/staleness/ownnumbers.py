"""The optimizer's numbers where workers are in different steps: each update goes by its rank's own.

Every rank must still set the same numbers before the same steps, as its learning rate's schedule
does. What the first one announces is kept until the last one has announced the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from foreprop.core.agreement import describe_groups
from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.link.connection import Connection, bounded
from foreprop.path.calls import HYPERPARAMETERS_LIMIT_BYTES, decode_groups
from foreprop.path.executor import Executor

_Groups = tuple[Hyperparameters, ...]

_KEPT = 3
"""Some slices of a rank may be updated while it has announced the numbers of its next steps."""


class NumbersApart:
    """What ranks announce, in the order in which each of them does. Not thread-safe."""

    def __init__(self, ranks: int) -> None:
        self._said: deque[tuple[int, _Groups]] = deque()
        """Step, and numbers from that on."""
        self._dropped = 0
        self._heard = [0] * ranks
        """By rank: how many it has announced."""
        self._reached = [0] * ranks
        """By rank: its last step that has been asked for."""

    def announce(self, rank: int, step: int, groups: _Groups) -> None:
        """Raises `TrainingLoopError` if another rank has said something else."""
        place = self._heard[rank] - self._dropped
        if place == len(self._said):
            for other, reached in enumerate(self._reached):
                if reached >= step:
                    raise _unlike(rank, step, other)
            self._said.append((step, groups))
        at_step, others = self._said[place]
        if step != at_step:
            raise _unlike(rank, step, self._first(), at_step)
        if groups != others:
            raise TrainingLoopError(describe_groups(step, (self._first(), rank), others, groups))
        self._heard[rank] += 1
        while min(self._heard) - self._dropped > _KEPT:
            self._said.popleft()
            self._dropped += 1

    def _first(self) -> int:
        """Who has said all of it."""
        return max(range(len(self._heard)), key=self._heard.__getitem__)

    def at(self, rank: int, step: int) -> _Groups:
        """What this rank's updates of the step go by, the same as other ranks' of that step.

        Raises `TrainingLoopError` if they are not; `RemoteProtocolError` if none are known.
        """
        self._reached[rank] = max(self._reached[rank], step)
        heard = self._heard[rank] - self._dropped
        if heard < len(self._said) and self._said[heard][0] <= step:
            raise _unlike(self._first(), self._said[heard][0], rank)
        for place in range(heard - 1, -1, -1):
            announced, groups = self._said[place]
            if announced <= step:
                return groups
        raise RemoteProtocolError(f"rank {rank} pushed before it sent hyperparameters")


def _unlike(rank: int, step: int, other: int, at_step: int | None = None) -> TrainingLoopError:
    """One rank has changed the numbers before a step, and another one has not, or at another."""
    instead = "has not" if at_step is None else f"before step {at_step}"
    return TrainingLoopError(
        f"rank {rank} changed the optimizer's settings (lr, ...) before step {step}, and rank"
        f" {other} {instead}: every rank must set the same values before the same step"
    )


class OwnNumbers:
    """Owns the optimizer's numbers, in the place of `path.calls.AnnouncedNumbers`."""

    kinds = frozenset({Kind.HYPERPARAMETERS})

    def __init__(self, manifest: Manifest, executor: Executor) -> None:
        self._groups = manifest.optimizer.groups
        self._numbers = NumbersApart(executor.peers.count)
        self._lock = executor.lock

    def at(self, step: int, ranks: Sequence[int] = ()) -> _Groups:
        """Those of the one rank. With the lock held."""
        if not ranks:  # as tables and norms ask, which such a session has not
            raise RemoteProtocolError(f"numbers of all ranks for step {step}, with staleness")
        return self._numbers.at(ranks[0], step)

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, HYPERPARAMETERS_LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        groups = decode_groups(payload, self._groups)
        with self._lock:
            self._numbers.announce(peer.number, header.step, groups)
