"""A server's services beside slices: optimizer state, blobs, waits, `requires_grad`, goodbyes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from foreprop.core.frames import PeerLeft
from foreprop.core.freezing import TrainableWords, Turned
from foreprop.core.manifest import BUFFERS_BLOB, Manifest
from foreprop.core.wire import Flag, Header, Kind, decoded
from foreprop.engine.connection import (
    BoundedService,
    Collecting,
    Connection,
    bounded,
    exactly,
    nothing,
)
from foreprop.engine.executor import Executor
from foreprop.errors import Failure, RemoteProtocolError


class StateStore(Protocol):
    """Keeps the optimizer state of some slices or shards, by number, under the server's lock."""

    def state_limit_bytes(self, number: int) -> int: ...
    def export_state(self, number: int) -> bytes: ...
    def import_state(self, number: int, data: memoryview) -> None: ...
    def export_average(self, number: int) -> bytes: ...
    def import_average(self, number: int, data: memoryview) -> None: ...
    def export_master(self, number: int) -> bytes: ...


class States:
    """Owns optimizer state, averages and masters.

    ``store_of`` gives the store that has a number. It and ``export_gradient`` raise
    `RemoteProtocolError` for what is not this server's.
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
    """Says in words what slices and shards wait for.

    Of the ``collectors`` the first that has a number describes it.
    """

    def __init__(self, collectors: Sequence[Collecting]) -> None:
        self._collectors = collectors

    def describe(self, number: int, step: int) -> str:
        """What a slice or shard waits for, in words. With the lock held."""
        own = next(each for each in self._collectors if number in each)
        return own.describe_wait(number, step)

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        """Each number that only some peers have pushed, with its step and what it waits for."""
        for each in reversed(self._collectors):
            for number, step in each.incomplete():
                yield number, step, each.describe_wait(number, step)


class Statuses(BoundedService):
    """Owns the question what a slice or shard waits for, whose answer passes the queue."""

    kinds = frozenset({Kind.STATUS_PULL})

    def __init__(self, executor: Executor, waits: Waits) -> None:
        self._executor = executor
        self._waits = waits

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


class Goodbyes(BoundedService):
    """Owns goodbyes, of which the ``others`` learn before the slices' machine does."""

    kinds = frozenset({Kind.BYE})

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.others: list[Callable[[int], None]] = []

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        peer.left = True
        for on_left in self.others:
            on_left(peer.number)
        self._executor.dispatch(PeerLeft(peer.number))


_STEPS_KEPT = 2
"""How many steps' blobs are kept: no rank is more than one step behind another."""


class BlobShelf:
    """Blobs by number and step, and the ranks that wait for them. Not thread-safe.

    Each of ``readers`` ranks asks once for a frozen parameter, which is then dropped.
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
    """Owns a server's blobs, such as buffers and frozen parameters."""

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
        """Keep a blob, and send it to the ranks that have been waiting for it."""
        data = bytes(payload)
        with self._lock:
            peers = self._shelf.put(which_blob(header, self._manifest), header.step, data)
        for peer in peers:
            self.executor.answer(peer, Kind.BLOB_REPLY, header, data)

    def pull(self, peer: Connection, header: Header) -> bool:
        """Send the blob if it is here; returns whether it was, for else `hand_out` sends it."""
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


_TURNED = msgspec.json.Decoder(Turned)


class TrainableNotices(BoundedService):
    """Owns the workers' notices of `requires_grad`, and compares them.

    ``pass_on`` is a relay's, and called with what its first worker says.
    """

    kinds = frozenset({Kind.TRAINABLE})
    limit_bytes = 1 << 24

    def __init__(
        self,
        names: Sequence[str],
        executor: Executor,
        connections: Mapping[int, Connection],
        watch: Callable[[Callable[[Connection, int], None]], None],
        *,
        compares: Callable[[], bool] = lambda: True,
        pass_on: Callable[[Header, memoryview], None] | None = None,
    ) -> None:
        """``watch`` registers who is told of a peer's first push of each step.

        ``compares`` says whether all peers have heard all notices.
        """
        self._words = TrainableWords(names)
        self._count = len(names)
        self._executor = executor
        self._connections = connections
        self._watch = watch
        self._compares = compares
        self._pass_on = pass_on

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        turned = decoded(_TURNED, payload, "word of requires_grad")
        if not all(0 <= number < self._count for part in turned for number in part):
            raise RemoteProtocolError(f"word of requires_grad of one of {self._count} parameters")
        with self._executor.lock:
            self._words.tell(peer.number, header.step, turned)
            self._watch(self.begins)
            ahead = [each for each in self._connections.values() if each.last_step > header.step]
        for other in ahead:
            self.begins(other, header.step + 1)
        if self._pass_on is not None and peer.number == 0:
            self._pass_on(header, payload)

    def begins(self, peer: Connection, step: int) -> None:
        """Compare a peer's notices of the step before: it has begun a step, so those are all."""
        if not self._compares() or peer.left:
            return
        with self._executor.lock:
            here = [number for number, each in self._connections.items() if not each.left]
            found = self._words.differing(peer.number, step, here)
            if found is None:
                return
            after, other = found
            both = [(number, self._executor.peers.name(number)) for number in (other, peer.number)]
            reason = self._words.describe(after, sorted(both))
        self._executor.host.fail(Failure(kind="TrainingLoopError", message=reason, step=after))
