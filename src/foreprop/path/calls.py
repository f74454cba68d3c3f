"""What a server is told and asked beside slices: numbers, states, blobs, waits, goodbyes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from foreprop.core.agreement import describe_groups
from foreprop.core.barrier import StepBarrier
from foreprop.core.decoding import decoded
from foreprop.core.frames import PeerLeft
from foreprop.core.manifest import BUFFERS_BLOB, Hyperparameters, Manifest, Number
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.link.connection import Collecting, Connection, bounded, exactly, nothing
from foreprop.path.executor import Executor
from foreprop.path.optimizer import with_scale


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


# The optimizer's numbers.
_GROUPS = msgspec.json.Decoder(tuple[Hyperparameters, ...])


_KEPT_STEPS = 3
"""Some slices may be updated while others are in the step before."""


class HyperparameterHistory:
    """The optimizer's numbers by step, as each peer of a server announced them.

    ``ranks`` are the peers' (of relays their first workers'), for messages.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._by_peer: list[list[tuple[int, tuple[Hyperparameters, ...]]]] = [[] for _ in ranks]
        self._agreed: dict[int, tuple[Hyperparameters, ...]] = {}

    def announce(self, peer: int, step: int, groups: tuple[Hyperparameters, ...]) -> None:
        history = self._by_peer[peer]
        history.append((step, groups))
        del history[:-4]

    def at(self, step: int, ranks: Sequence[int] = ()) -> tuple[Hyperparameters, ...]:
        """What all ranks agree on for this step; raises `ForepropError` if they do not.

        ``ranks``, whose gradients it is about, are no matter, for all are in this step.
        """
        agreed = self._agreed.get(step)
        if agreed is None:
            said: list[tuple[Hyperparameters, ...]] = []
            for rank, history in zip(self._ranks, self._by_peer, strict=True):
                for announced, groups in reversed(history):
                    if announced <= step:
                        said.append(groups)
                        break
                else:
                    raise RemoteProtocolError(f"rank {rank} pushed before it sent hyperparameters")
                if said[-1] != said[0]:
                    ranks = (self._ranks[0], rank)
                    raise TrainingLoopError(describe_groups(step, ranks, said[0], said[-1]))
            agreed = self._agreed[step] = said[0]
            if len(self._agreed) > _KEPT_STEPS:
                del self._agreed[next(iter(self._agreed))]
        return agreed


def decode_groups(
    payload: memoryview, expected: Sequence[Hyperparameters]
) -> tuple[Hyperparameters, ...]:
    groups = decoded(_GROUPS, payload, "hyperparameters")
    if [sorted(g) for g in groups] != [sorted(g) for g in expected]:
        raise RemoteProtocolError("hyperparameters have other names than at the start")
    for group, begun_with in zip(groups, expected, strict=True):
        for name, number in group.items():
            if not _are_alike(number, begun_with[name]):
                raise RemoteProtocolError(
                    f"hyperparameters: {name} is {str(number)[:40]}, and was {begun_with[name]}"
                )
    return groups


def _are_alike(number: Number, other: Number) -> bool:
    """Whether an optimizer can be told the one where it was told the other."""
    if isinstance(number, list):
        return isinstance(other, list) and len(number) == len(other)
    if number is None or other is None:
        return number is other
    # a whole number may be larger than any other
    return not isinstance(other, list) and abs(number) <= sys.float_info.max


HYPERPARAMETERS_LIMIT_BYTES = 1 << 20


class AnnouncedNumbers:
    """Owns the optimizer's numbers, as each peer announces them.

    ``pass_on`` is a relay's: called with what its first worker says.
    """

    kinds = frozenset({Kind.HYPERPARAMETERS})

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        *,
        pass_on: Callable[[Header, memoryview], None] | None = None,
    ) -> None:
        scale = 1.0 if manifest.knobs.aggregation.skip_nonfinite else None
        self._groups = with_scale(manifest.optimizer.groups, scale)
        """What the numbers look like."""
        self._history = HyperparameterHistory([ranks.start for ranks in executor.peers.ranks])
        self._lock = executor.lock
        self._pass_on = pass_on
        self.at = self._history.at
        """What all agree on for a step; raises `ForepropError`. Called with the lock held."""

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, HYPERPARAMETERS_LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        groups = decode_groups(payload, self._groups)
        with self._lock:
            self._history.announce(peer.number, header.step, groups)
        if self._pass_on is not None and peer.number == 0:
            self._pass_on(header, payload)
