"""Slices on a server or relay: pushes and values come in, replies go out.

A receiving thread reads a push straight into a pooled buffer; the machine decides, under the lock,
what happens next. The thread whose push completes a slice also updates it (`Updates`),
while its bytes are in the cache; as long as it does, completed slices queue in the machine, and the
most urgent is next. On a relay it adds up the node's gradients instead (`nodes.nodesums`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from foreprop.core.collect import SendSquares, SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    InstallValue,
    PullArrived,
    PushArrived,
    SendFrame,
    Stage,
    ValueArrived,
)
from foreprop.core.lateness import ArrivalLog
from foreprop.core.manifest import Hyperparameters
from foreprop.core.norm import encode_square_sums
from foreprop.core.server_machine import ServerMachine
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import EMPTY, Connection, check_size, exactly, nothing
from foreprop.engine.executor import Executor, Sent
from foreprop.engine.optimizer import scale_of
from foreprop.engine.slicestore import SliceStore
from foreprop.engine.sums import GradientBuffer


class SliceRoom(Protocol):
    """Memory for what comes and bytes of what goes: `SliceStore` or `RelayStore`."""

    def size_bytes(self, slice_: int, *, value: bool = False) -> int: ...
    def take_buffer(self, slice_: int, *, value: bool = False) -> GradientBuffer: ...
    def put_gradient(self, slice_: int, rank: int, buffer: GradientBuffer) -> None: ...
    def put_value(self, slice_: int, buffer: GradientBuffer, *, step: int = 0) -> None: ...
    def install_value(self, slice_: int) -> None: ...
    def values(self, slice_: int) -> memoryview: ...


CheckGradient = Callable[[torch.Tensor, str, str, int], None]
"""Looks at a gradient: whose, of which parameter, of which step; may raise."""


class Slices:
    """Owns pushes, values and pulls of slices; ``names`` has the parameter of each slice."""

    kinds = frozenset({Kind.PUSH, Kind.VALUE, Kind.PULL})

    def __init__(
        self,
        machine: ServerMachine[Any],
        executor: Executor,
        store: SliceRoom,
        names: Sequence[str],
        *,
        check: CheckGradient | None = None,
    ) -> None:
        self._machine = machine
        self._executor = executor
        self._lock = executor.lock
        self._store = store
        self._names = names
        self._check = check
        self._trace = executor.host.trace
        self._log: ArrivalLog | None = None
        self._begins: Callable[[Connection, int], None] | None = None
        self._incoming: dict[int, GradientBuffer] = {}  # by peer, what is arriving
        executor.doers[InstallValue] = lambda _: None  # done under the lock, see `_on_value`

    def room(self, peer: Connection, header: Header) -> memoryview:
        kind, slice_ = header.kind, header.slice
        self._machine.owned(slice_)
        if kind == Kind.PULL:
            return nothing(header)
        if kind == Kind.PUSH and header.flags & Flag.NO_GRADIENT:
            return exactly(header, 0)
        value = kind == Kind.VALUE
        size_bytes = self._store.size_bytes(slice_, value=value)
        if header.payload_bytes != size_bytes:
            check_size(header, size_bytes)
        with self._lock:
            buffer = self._store.take_buffer(slice_, value=value)
        self._incoming[peer.number] = buffer
        return buffer.view

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        kind, _, _, step, slice_, priority, _ = header
        if kind == Kind.PULL:
            self._executor.dispatch(PullArrived(peer.number, slice_, step, priority))
            return
        buffer = self._incoming.pop(peer.number, None)
        if kind == Kind.VALUE:
            self._on_value(ValueArrived(peer.number, slice_, step, priority), buffer)
            return
        if self._check is not None and buffer is not None:
            whose = self._executor.peers.name(peer.number)
            self._check(buffer.tensor, whose, self._names[slice_], step)
        event = PushArrived(peer.number, slice_, step, priority, header.flags)
        if self._begins is not None and step > peer.last_step:
            self._begins(peer, step)
        with self._lock:
            if buffer is not None:  # a refused push ends the session, so it is never summed
                self._store.put_gradient(slice_, peer.number, buffer)
            instructions = self._machine.handle(event)
            if self._log is not None:
                self._log.arrived(peer.number, slice_, step, time.monotonic())
        peer.last_push = (slice_, step)
        if self._trace is not None:
            name, began_ns = self._names[slice_], peer.receive_started_ns
            self._trace.slice_span(Stage.PUSH_RECEIVED, name, header, began_ns)
        self._executor.execute(instructions)

    def _on_value(self, event: ValueArrived, buffer: GradientBuffer | None) -> None:
        with self._lock:
            instructions = self._machine.handle(event)
            if buffer is not None:
                self._store.put_value(event.slice, buffer, step=event.step)
            # under the lock: the sender may already be about to send this slice
            for instruction in instructions:
                if isinstance(instruction, InstallValue):
                    self._store.install_value(instruction.slice)
        self._executor.execute(instructions)

    def payload_of(self, frame: SendFrame) -> memoryview:
        if frame.kind == Kind.REPLY and not frame.flags & Flag.UNCHANGED:
            return self._store.values(frame.slice)
        return EMPTY

    def watch(self, begins: Callable[[Connection, int], None]) -> None:
        """Have ``begins`` told of the first push of each step of a peer."""
        self._begins = begins

    def note_arrivals(self, log: ArrivalLog) -> None:
        """Have a log told of each push, with the lock held."""
        self._log = log

    def catch_up(self) -> None:
        """Tell the log of what has come; here it is told at once."""

    # What it waits for.
    def __contains__(self, number: int) -> bool:
        """Whatever no other collector has: an unknown number's error is a slice's."""
        return True

    def incomplete(self) -> Sequence[tuple[int, int]]:
        return self._machine.incomplete()

    def describe_wait(self, number: int, step: int) -> str:
        return self._machine.describe_wait(number, step)


_SLICE_UPDATED = SliceUpdated()


SettingsAt = Callable[[int, Sequence[int]], tuple[Hyperparameters, ...]]
"""Gives the optimizer's numbers for an update by these ranks' gradients. Locked."""


class Updates:
    """Makes updates or averages, one at a time, in whichever thread comes first."""

    def __init__(
        self,
        executor: Executor,
        store: SliceStore,
        settings_at: SettingsAt,
        names: Sequence[str],
    ) -> None:
        self.coefficient = 1.0
        """What clipping multiplies gradients by, in the step whose updates are under way."""
        self._executor = executor
        self._lock = executor.lock
        self._store = store
        self._settings_at = settings_at
        self._names = names
        self._trace = executor.host.trace
        self._leaving: dict[int, GradientBuffer | None] = {}  # by peer, see `SliceStore.reading`
        self._updated: Callable[[int], None] | None = None
        self._updated_ns: dict[tuple[int, int], int] = {}  # by slice and step, for the trace
        executor.doers[UpdateSlice] = self._update
        executor.doers[SendSquares] = self._send_squares

    def note_updates(self, updated: Callable[[int], None]) -> None:
        """Have ``updated`` told of each slice that is updated, with the lock held."""
        self._updated = updated

    def _update(self, update: UpdateSlice) -> Sequence[object]:
        """Make one update; returns the instructions that follow from it."""
        started_ns = self._trace.now_ns() if self._trace is not None else 0
        finished = _SLICE_UPDATED
        if update.gradient:
            measure = update.measure
            pushed = (update.slice, update.ranks, update.counted)
            squares = self._store.aggregate_only(*pushed, measure=measure)
            finished = SliceUpdated(squares)
        else:
            with self._lock:
                groups = self._settings_at(update.step, update.ranks) if update.ranks else ()
            slice_, step, ranks = update[:3]
            about = (slice_, ranks, groups, self.coefficient)
            scale, counted = scale_of(groups), update.counted
            self._store.update(*about, scale=scale, step=step, counted=counted)
        if self._trace is not None:
            name, step = self._names[update.slice], update.step
            self._trace.span(Stage.UPDATED.value, name, started_ns, step=step, slice_=update.slice)
            # the step before may still be asked for, when its reply has left
            self._updated_ns.pop((update.slice, step - 2), None)
            self._updated_ns[update.slice, step] = self._trace.now_ns()
        with self._lock:
            if self._updated is not None:
                self._updated(update.slice)
            return self._executor.handle(finished)

    def _send_squares(self, known: SendSquares) -> None:
        about = Header(Kind.NORM_PART, 0, 0, known.step, 0, CONTROL_PRIORITY, 0)
        self._executor.answer_all(Kind.NORM_PART, about, encode_square_sums(known.squares))

    # Replies.
    def payload_of(self, frame: SendFrame) -> memoryview:
        if frame.flags & Flag.UNCHANGED:
            return EMPTY
        data, self._leaving[frame.peer] = self._store.reading(frame.slice)
        return data

    @property
    def told(self) -> Mapping[Kind, Sent]:
        """Who is told of frames that have left, by kind."""
        is_told = self._store.lets_go or self._trace is not None
        return {Kind.REPLY: self._reply_sent} if is_told else {}

    def _reply_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        given = self._leaving.pop(frame.peer, None)
        if given is not None:
            self._store.was_read(frame.slice, given)
        if self._trace is not None:
            peer, kind, step, slice_, priority, flags, _ = frame
            sent = Header(kind, flags, peer, step, slice_, priority, size_bytes)
            queued_ns = self._updated_ns.get((slice_, step), started_ns)
            span, name = self._trace.slice_span, self._names[slice_]
            span(Stage.REPLY_QUEUED, name, sent, queued_ns, stop_ns=started_ns)
            span(Stage.REPLY_SENT, name, sent, started_ns)
