"""The optimizer's numbers where not all workers count: those who do must agree, and they alone."""

from __future__ import annotations

from collections.abc import Sequence

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

    def __init__(self, manifest: Manifest, executor: Executor) -> None:
        self._expected = manifest.optimizer.groups
        self._said: list[list[tuple[int, tuple[Hyperparameters, ...]]]]
        """By rank: from which step on it has announced what."""
        self._said = [[] for _ in range(manifest.world_size)]
        self._agreed: dict[tuple[int, tuple[int, ...]], tuple[Hyperparameters, ...]] = {}
        self._lock = executor.lock

    def at(self, step: int, ranks: Sequence[int] = ()) -> tuple[Hyperparameters, ...]:
        """What these agree on; raises `TrainingLoopError` if they do not. With the lock held."""
        key = (step, tuple(ranks))
        agreed = self._agreed.get(key)
        if agreed is None:
            said = [self._of(rank, step) for rank in key[1]]
            for rank, groups in zip(key[1], said, strict=True):
                if groups != said[0]:
                    pair = (key[1][0], rank)
                    raise TrainingLoopError(describe_groups(step, pair, said[0], groups))
            agreed = self._agreed[key] = said[0]
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
