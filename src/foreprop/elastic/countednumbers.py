"""The optimizer's numbers where not all workers count: those who do must agree, and they alone."""

from __future__ import annotations

from collections.abc import Container, Sequence

from foreprop.core.agreement import describe_groups
from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.link.connection import Connection, bounded
from foreprop.path.calls import HYPERPARAMETERS_LIMIT_BYTES, decode_groups
from foreprop.path.executor import Executor

_KEPT = 4
"""A rank may have announced the next step's while the last one's slices are updated."""


class CountedNumbers:
    """Owns what ranks announce, in the place of `path.calls.AnnouncedNumbers`."""

    kinds = frozenset({Kind.HYPERPARAMETERS})

    def __init__(self, manifest: Manifest, executor: Executor, newcomers: Container[int]) -> None:
        """``newcomers``: who has ever joined. If others say something else, that counts."""
        self.unlike: dict[int, str] = {}
        """Those whose numbers are not the others', and in what."""
        self._newcomers = newcomers
        self._expected = manifest.optimizer.groups
        self._said: list[list[tuple[int, tuple[Hyperparameters, ...]]]]
        """By rank: from which step on it has announced what."""
        self._said = [[] for _ in range(manifest.most_workers)]
        self._agreed: dict[tuple[int, tuple[int, ...]], tuple[Hyperparameters, ...]] = {}
        self._lock = executor.lock

    def at(self, step: int, ranks: Sequence[int] = ()) -> tuple[Hyperparameters, ...]:
        """What these agree on; raises `TrainingLoopError` if they do not. With the lock held."""
        key = (step, tuple(ranks))
        agreed = self._agreed.get(key)
        if agreed is None:
            ranks = sorted(key[1], key=lambda rank: (rank in self._newcomers, rank))
            first = self._of(ranks[0], step)
            for rank in ranks[1:]:
                if (groups := self._of(rank, step)) != first:
                    text = describe_groups(step, (ranks[0], rank), first, groups)
                    if rank not in self._newcomers:
                        raise TrainingLoopError(text)
                    self.unlike[rank] = text
            agreed = self._agreed[key] = first
            if len(self._agreed) > _KEPT:
                del self._agreed[next(iter(self._agreed))]
        return agreed

    def _of(self, rank: int, step: int) -> tuple[Hyperparameters, ...]:
        for announced, groups in reversed(self._said[rank]):
            if announced <= step:
                return groups
        raise RemoteProtocolError(f"rank {rank} pushed before it sent hyperparameters")

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, HYPERPARAMETERS_LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        groups = decode_groups(payload, self._expected)
        with self._lock:
            said = self._said[peer.number]
            said.append((header.step, groups))
            del said[:-_KEPT]
