"""What rank 0 leaves with a server for the other ranks: buffers, and frozen parameters."""

from __future__ import annotations

from foreprop.core.manifest import BUFFERS_BLOB

_STEPS_KEPT = 2
"""No rank is more than one step behind another."""


class BlobShelf:
    """Blobs by number and step, and who waits for which. Not thread-safe.

    ``readers`` is the number of ranks that will ask for each frozen parameter, once.
    """

    def __init__(self, *, readers: int) -> None:
        self._readers = readers
        self._kept: dict[int, dict[int, bytes]] = {}
        self._waiting: dict[tuple[int, int], list[int]] = {}
        self._handed_out: dict[int, int] = {}

    def put(self, which: int, step: int, data: bytes) -> list[int]:
        """Keep a blob; returns the ranks that have been waiting for it."""
        steps = self._kept.setdefault(which, {})
        steps[step] = data
        for old in sorted(steps)[:-_STEPS_KEPT]:
            del steps[old]
        ranks = self._waiting.pop((which, step), [])
        for _ in ranks:
            self._count(which)
        return ranks

    def pull(self, which: int, step: int, rank: int) -> bytes | None:
        """The blob, or None: then `put` will name the rank."""
        data = self._kept.get(which, {}).get(step)
        if data is None:
            ranks = self._waiting.setdefault((which, step), [])
            if rank not in ranks:
                ranks.append(rank)
        else:
            self._count(which)
        return data

    def _count(self, which: int) -> None:
        handed_out = self._handed_out[which] = self._handed_out.get(which, 0) + 1
        if which != BUFFERS_BLOB and handed_out >= self._readers:
            self._kept.pop(which, None)
