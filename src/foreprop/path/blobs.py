"""What rank 0 leaves with a server for the other ranks: buffers, and frozen parameters."""

from __future__ import annotations

from foreprop.core.manifest import BUFFERS_BLOB, Manifest
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection
from foreprop.path.executor import Executor
from foreprop.path.services import exactly, nothing

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


class Blobs:
    """Owns blobs and who asks for them, on a server."""

    kinds = frozenset({Kind.BLOB, Kind.BLOB_PULL})

    def __init__(self, manifest: Manifest, executor: Executor, *, readers: int) -> None:
        self._manifest = manifest
        self._executor = executor
        self._lock = executor.lock
        self._shelf = BlobShelf(readers=readers)

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.BLOB_PULL:
            return nothing(header)
        return exactly(header, self._manifest.blob_bytes[which_blob(header, self._manifest)])

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BLOB_PULL:
            self.pull(peer, header)
            return
        if header.rank != 0:
            raise RemoteProtocolError(f"rank {header.rank} sent buffers; only rank 0 may")
        self.hand_out(header, payload)

    def hand_out(self, header: Header, payload: memoryview) -> None:
        """Keep a blob, and answer who has been waiting for it."""
        data = bytes(payload)
        with self._lock:
            peers = self._shelf.put(which_blob(header, self._manifest), header.step, data)
        for peer in peers:
            self._executor.answer(peer, Kind.BLOB_REPLY, header, data)

    def pull(self, peer: Connection, header: Header) -> bool:
        """Answer if the blob is here, and say whether it is; or else `hand_out` will."""
        with self._lock:
            which = which_blob(header, self._manifest)
            data = self._shelf.pull(which, header.step, peer.number)
        if data is not None:
            self._executor.answer(peer.number, Kind.BLOB_REPLY, header, data)
        return data is not None


def which_blob(header: Header, manifest: Manifest) -> int:
    if header.slice >= len(manifest.blob_bytes):
        raise RemoteProtocolError(f"there is no blob {header.slice}")
    return header.slice
