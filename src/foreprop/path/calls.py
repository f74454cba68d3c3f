"""What a server is told and asked beside slices: states, blobs, waits, goodbyes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from foreprop.core.barrier import StepBarrier
from foreprop.core.frames import PeerLeft
from foreprop.core.manifest import BUFFERS_BLOB, Manifest
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Collecting, Connection, bounded, exactly, nothing
from foreprop.path.executor import Executor


class StateStore(Protocol):
    """Has the optimizer state of some slices or shards, by number. Called with the lock held."""

    def state_limit_bytes(self, number: int) -> int: ...
    def export_state(self, number: int) -> bytes: ...
    def import_state(self, number: int, data: memoryview) -> None: ...
    def export_average(self, number: int) -> bytes: ...
    def import_average(self, number: int, data: memoryview) -> None: ...
    def export_master(self, number: int) -> bytes: ...


class States:
    """Owns optimizer state, averages and masters; ``store_of`` says who has a number's.

    That and ``export_gradient`` raise `RemoteProtocolError` for what is not this server's.
    """

    kinds = frozenset({Kind.STATE, Kind.STATE_PULL})

    def __init__(
        self,
        executor: Executor,
        store_of: Callable[[int], StateStore],
        export_gradient: Callable[[int], bytes],
    ) -> None:
        self._executor = executor
        self._lock = executor.lock
        self._store_of = store_of
        self._export_gradient = export_gradient

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.STATE_PULL:
            return nothing(header)
        limit_bytes = self._store_of(header.slice).state_limit_bytes(header.slice)
        return bounded(header, limit_bytes)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        number, flags = header.slice, header.flags
        with self._lock:
            store = self._store_of(number)
            if header.kind == Kind.STATE:
                averages = flags & Flag.AVERAGES
                (store.import_average if averages else store.import_state)(number, payload)
                return
            if flags & Flag.AVERAGES:
                data = store.export_average(number)
            elif flags & Flag.GRADIENT:
                data = self._export_gradient(number)
            elif flags & Flag.MASTER:
                data = store.export_master(number)
            else:
                data = store.export_state(number)
        self._executor.answer(peer.number, Kind.STATE_REPLY, header, data)


class Waits:
    """What slices and shards wait for. ``collectors``: the first that has a number describes it."""

    def __init__(
        self, collectors: Sequence[Collecting], barrier: StepBarrier | None = None
    ) -> None:
        self.collectors = list(collectors)
        self._barrier = barrier

    def describe(self, number: int, step: int) -> str:
        """What is at the barrier waits for all others, too. With the lock held."""
        own = next(each for each in self.collectors if number in each)
        text = own.describe_wait(number, step)
        if self._barrier is not None and self._barrier.holds(number):
            for each in self.collectors:
                for other, at_step in each.incomplete() if each is not own else ():
                    return f"{text}; {self.describe(other, at_step)}"
        return text

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        """What some peers have pushed and others not: number, step and what it waits for."""
        for each in reversed(self.collectors):
            for number, step in each.incomplete():
                yield number, step, each.describe_wait(number, step)


class Statuses:
    """Owns the question what a slice or shard waits for; the answer passes the queue."""

    kinds = frozenset({Kind.STATUS_PULL})

    def __init__(self, executor: Executor, waits: Waits) -> None:
        self._executor = executor
        self._waits = waits

    def room(self, peer: Connection, header: Header) -> memoryview:
        return nothing(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        with self._executor.lock:
            text = self._waits.describe(header.slice, header.step)
        self.answer(peer, header, text)

    def answer(self, peer: Connection, header: Header, text: str) -> None:
        sending_to = self._executor.sending_to()
        if sending_to:
            text += f"; it is sending to {self._executor.peers.names(sending_to)}"
        place = {"step": header.step, "slice_": header.slice}
        peer.send_past_queue(Kind.STATUS_REPLY, text.encode(), **place)


class Goodbyes:
    """Owns goodbyes. ``others`` learn of a peer's end before the slices' machine does."""

    kinds = frozenset({Kind.BYE})

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.others: list[Callable[[int], None]] = []

    def room(self, peer: Connection, header: Header) -> memoryview:
        return nothing(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        peer.left = True
        for on_left in self.others:
            on_left(peer.number)
        self._executor.dispatch(PeerLeft(peer.number))


_STEPS_KEPT = 2
"""No rank is more than one step behind another."""


class BlobShelf:
    """Blobs by number and step, and who waits for which. Not thread-safe.

    ``readers``: so many ranks will ask for each frozen parameter, once.
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
        self.executor = executor
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
            self.executor.answer(peer, Kind.BLOB_REPLY, header, data)

    def pull(self, peer: Connection, header: Header) -> bool:
        """Answer if the blob is here, and say whether it is; or else `hand_out` will."""
        with self._lock:
            which = which_blob(header, self._manifest)
            data = self._shelf.pull(which, header.step, peer.number)
        if data is not None:
            self.executor.answer(peer.number, Kind.BLOB_REPLY, header, data)
        return data is not None


def which_blob(header: Header, manifest: Manifest) -> int:
    if header.slice >= len(manifest.blob_bytes):
        raise RemoteProtocolError(f"there is no blob {header.slice}")
    return header.slice
