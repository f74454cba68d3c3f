"""Do all ranks draw the same order? If not, samples are lost and repeated without a word."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from foreprop.cluster.world import World
from foreprop.errors import ConfigError, TransportError

_COMPARED = 64  # of a pass: orders that differ do so early


class OrderCheck:
    """Compares the beginning of each pass with rank 0's, as soon as that is known: never waits."""

    def __init__(self, world: World, sampler: Any) -> None:
        self._world = world
        self._sampler = sampler
        self._key = f"order/{world.next_loader()}"
        self._passes: Counter[int] = Counter()
        self._open: dict[str, bytes] = {}
        """By key: what is here in passes of which rank 0 has not told."""

    def watch(self, drawn: Iterator[Any], epoch: int) -> Iterator[Any]:
        """The same items. Raises `ConfigError` if rank 0 has drawn others."""
        key = f"{self._key}/{epoch}/{self._passes[epoch]}"  # some ranks look at a batch before
        self._passes[epoch] += 1
        digest, count = zlib.crc32(str(_maybe_length(self._sampler)).encode()), 0
        for item in drawn:
            if count < _COMPARED:
                digest = zlib.crc32(repr(item).encode(), digest)
            count += 1
            if count == _COMPARED:
                self._compare_digest(key, digest)
            yield item
        if count < _COMPARED:
            self._compare_digest(key, digest)
        self._compare()

    def _compare_digest(self, key: str, digest: int) -> None:
        if self._world.rank == 0:
            self._world.entries.set(key, str(digest))
            return
        self._open[key] = str(digest).encode()
        self._compare()

    def _compare(self) -> None:
        for key, here in list(self._open.items()):
            try:
                there = self._world.entries.maybe_get(key)
            except TransportError:  # rank 0 may be through with everything
                return
            if there is None:
                return
            del self._open[key]
            if there != here:
                raise ConfigError(
                    f"{type(self._sampler).__name__} draws another order on rank {self._world.rank}"
                    " than on rank 0, or of another length: give all ranks the same data, seed the"
                    " sampler's generator, and whatever else it draws from, alike on every rank, or"
                    " give it none, so that shard(loader, seed=...) decides"
                )


def _maybe_length(sampler: Any) -> int | None:
    return len(sampler) if hasattr(sampler, "__len__") else None
