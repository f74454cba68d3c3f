"""What a server is asked beside slices: optimizer state, what something waits for, goodbyes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from foreprop.core.barrier import StepBarrier
from foreprop.core.frames import PeerLeft
from foreprop.core.wire import Flag, Header, Kind
from foreprop.link.connection import Connection
from foreprop.path.executor import Executor
from foreprop.path.services import Collecting, bounded, nothing


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
