"""A relay's sums: a node's gradients of a slice become one push; its answer goes to all workers.

A receiving thread whose push is a slice's last of this node adds the gradients up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from foreprop.core.frames import (
    CONTROL_PRIORITY,
    Finish,
    NotifyArrived,
    ReplyArrived,
    SendFrame,
    SliceUpdated,
    UpdateSlice,
)
from foreprop.core.peers import SERVER
from foreprop.core.relay_machine import RelayMachine
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError, TransportError
from foreprop.link.connection import EMPTY, Connection, bounded, exactly
from foreprop.observe.trace import RelayStage, Stage, span
from foreprop.path.executor import Executor
from foreprop.path.slices import SettingsAt, Slices
from foreprop.path.slicestore import GradientBuffer
from foreprop.relays.relaystore import RelayStore


class Sums:
    """Owns the server's answers to what the node has pushed; makes the sums."""

    kinds = frozenset({Kind.REPLY, Kind.NOTIFY})

    def __init__(
        self,
        machine: RelayMachine,
        executor: Executor,
        store: RelayStore,
        settings_at: SettingsAt,
        slices: Slices,
        names: Sequence[str],
        link: Connection,
    ) -> None:
        self.has_left = False
        self._machine = machine
        self._executor = executor
        self._lock = executor.lock
        self._store = store
        self._settings_at = settings_at
        self._payload_to_worker: Callable[[SendFrame], memoryview] = slices.payload_of
        self._names = names
        self._link = link
        self._trace = executor.host.trace
        self._leaving: GradientBuffer | None = None  # the sum that is under way to the server
        executor.doers[UpdateSlice] = self._sum
        executor.doers[Finish] = self._leave
        executor.payload_of = self._payload_of
        executor.on_sent = self._on_sent

    # From the server.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.NOTIFY:
            return bounded(header, 0)
        if not self._machine.awaits(header.slice, header.step):
            raise RemoteProtocolError(
                f"server {peer.rank} sent a reply for slice {header.slice}, step"
                f" {header.step}, which is not awaited"
            )
        if header.flags & Flag.UNCHANGED:
            return exactly(header, 0)
        return self._store.room(header.slice, header.payload_bytes)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        slice_, step = header.slice, header.step
        if header.kind == Kind.NOTIFY:
            self._executor.dispatch(NotifyArrived(slice_, step, SERVER, header.flags))
            return
        with self._lock:
            self._store.land(slice_, payload)
        self._span(Stage.REPLY_RECEIVED, header, peer.receive_started_ns)
        self._executor.dispatch(ReplyArrived(slice_, step, SERVER, header.priority, header.flags))

    # Sums.
    def _sum(self, asked: UpdateSlice) -> Sequence[object]:
        """Make the one sum that is under way; returns what follows from it."""
        started_ns = time.perf_counter_ns()
        if asked.ranks and not asked.gradient:
            with self._lock:
                self._settings_at(asked.step)
        self._store.add_up(asked.slice, asked.ranks)
        about = Header(Kind.PUSH, 0, 0, asked.step, asked.slice, 0, 0)
        self._span(RelayStage.NODE_SUMMED, about, started_ns)
        with self._lock:
            self._store.keep_sum_only(asked.slice)
            return self._machine.handle(SliceUpdated())

    def _leave(self, _: Finish) -> None:
        """Every worker of the node has said goodbye, and all that they said has been passed on."""
        self.has_left = True
        with contextlib.suppress(TransportError):  # the link's thread has seen it, too
            self._link.send(Kind.BYE, 0, 0, 0, CONTROL_PRIORITY, EMPTY)

    # The sending threads.
    def _payload_of(self, frame: SendFrame) -> memoryview:
        if frame.peer != SERVER:
            return self._payload_to_worker(frame)
        with self._lock:
            if frame.kind == Kind.VALUE:
                return self._store.take_value(frame.slice, frame.step)
            if frame.kind == Kind.PUSH:
                self._leaving = self._store.take_sum(frame.slice)
            return self._leaving.view if self._leaving is not None else EMPTY

    def _on_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        peer, kind, step, slice_, priority, flags, _ = frame
        about = Header(kind, flags, max(0, peer), step, slice_, priority, size_bytes)
        if peer != SERVER:
            if kind == Kind.REPLY:
                self._span(Stage.REPLY_SENT, about, started_ns)
            return
        if kind == Kind.PUSH:
            self._span(Stage.PUSH_SENT, about, started_ns)
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            with self._lock:
                self._store.give_back(leaving)

    def _span(self, stage: Stage | RelayStage, about: Header, started_ns: int) -> None:
        if self._trace is not None:
            span(self._trace, stage, self._names, about, started_ns)
