"""A server whose slices the native plane carries: its machine, and what it hears of pushes.

The machine decides what is said beside slices, and the values to begin from. Where it knows of a
slice only what the plane has done, it asks that (`engine.plane`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from foreprop.core.frames import PeerLeft, PullArrived, PushArrived, Stage
from foreprop.core.lateness import ArrivalLog
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import Header, Kind
from foreprop.engine.connection import EMPTY, Connection
from foreprop.engine.plane import Plane, SliceSpan
from foreprop.engine.slices import Slices
from foreprop.engine.sums import SameBatch
from foreprop.errors import InternalError

_looked_at = attrgetter("priority", "done", "rounds", "owed")


class SameBatchLook:
    """Has `SameBatch` told of what the plane has seen on one server."""

    def __init__(self, plane: Plane, index: int, ranks: int) -> None:
        self._plane, self._index, self._ranks = plane, index, ranks
        self._same = SameBatch(f"server {index}")

    def look(self) -> None:
        if self._same.watching:
            self._same.note(self._plane.same_batch(self._index), many=self._ranks)


class PlaneServer(ServerMachine[Any]):
    """A server's machine beside the plane: of slices it knows what the plane says when asked."""

    def __init__(self, plane: Plane, slices: Sequence[Slice], *, index: int, **about: Any) -> None:
        super().__init__(slices, index=index, **about)
        self._plane = plane

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Know what the plane knows of slices, in here only: it may be ahead of what comes next."""
        before = [(each, _looked_at(each)) for each in self._states.values()]
        try:
            for number, priority, done, here, pushed in self._plane.snapshot(self._index):
                state = self._states[number]
                state.priority, state.done = priority, max(done, state.done)
                state.rounds = {here: pushed} if pushed else {}
                state.owed = dict.fromkeys(pushed, (here[0], priority))
            yield
        finally:
            for state, were in before:
                state.priority, state.done, state.rounds, state.owed = were

    def handle(self, event: Any) -> Sequence[Any]:
        if isinstance(event, PushArrived | PullArrived):
            raise InternalError(f"the plane has let {event!r} pass")
        if not isinstance(event, PeerLeft):
            return super().handle(event)
        self._plane.peer_left(self._index, event.rank)
        with self._looking():
            return super().handle(event)

    def describe_wait(self, slice_: int, step: int) -> str:
        with self._looking():
            return super().describe_wait(slice_, step)

    def incomplete(self) -> list[tuple[int, int]]:
        with self._looking():
            return super().incomplete()


class PlaneSlices(Slices):
    """The slices of a server whose pushes the plane takes: it tells of some of them."""

    def __init__(
        self, plane: Plane, index: int, *about: Any, on_told: Callable[[], object] = lambda: None
    ) -> None:
        """``on_told`` is called with each push that it tells of."""
        super().__init__(*about)
        self._on_told = on_told
        self._plane = plane
        self._index = index
        self._heard: deque[SliceSpan] = deque()

    def room(self, peer: Connection, header: Header) -> memoryview:
        return EMPTY if header.kind == Kind.PUSH else super().room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind != Kind.PUSH:
            super().on_frame(peer, header, payload)
            return
        self._on_told()
        if self._begins is not None and header.step > peer.last_step:
            peer.last_push = (header.slice, header.step)
            self._begins(peer, header.step)

    def watch(self, begins: Callable[[Connection, int], None]) -> None:
        super().watch(begins)
        self._plane.tell_begins(self._index)

    def note_arrivals(self, log: ArrivalLog) -> None:
        super().note_arrivals(log)
        self._plane.tell(self._index, self._heard.append)

    def catch_up(self) -> None:
        if self._log is None:
            return
        self._plane.draw(self._index)
        while self._heard:
            span = self._heard.popleft()
            if span.stage is Stage.UPDATED:
                self._log.updated(span.slice_, span.stop_ns / 1e9)
            elif span.stage is Stage.PUSH_RECEIVED:
                self._log.arrived(span.peer, span.slice_, span.step, span.stop_ns / 1e9)
