"""Slices on a server or relay: pushes and values come in, replies go out.

A receiving thread reads a push straight into a pooled buffer; the machine decides, under the lock,
what happens next. The thread whose push completes a slice also updates it (`Updates`),
while its bytes are in the cache; as long as it does, completed slices queue in the machine, and the
most urgent is next. On a relay it adds up the node's gradients instead (`relays.nodesums`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

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
from foreprop.core.manifest import Hyperparameters
from foreprop.core.norm import encode_square_sums
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Header, Kind
from foreprop.link.connection import EMPTY, Connection, check_size, exactly, nothing
from foreprop.path.executor import Executor, Machine
from foreprop.path.pipeline import Sent
from foreprop.path.slicestore import SliceStore
from foreprop.path.sums import GradientBuffer

if TYPE_CHECKING:
    from foreprop.observe.trace import TraceRecorder


class SliceMachine(Machine, Protocol):
    def owned(self, slice_: int) -> Slice:
        """The slice, if it is this server's; raises `RemoteProtocolError` otherwise."""

    def incomplete(self) -> Sequence[tuple[int, int]]: ...
    def describe_wait(self, slice_: int, step: int) -> str: ...


class SliceRoom(Protocol):
    """`SliceStore` or `RelayStore`: memory for what comes, bytes of what goes."""

    def size_bytes(self, slice_: int, *, value: bool = False) -> int: ...
    def take_buffer(self, slice_: int, *, value: bool = False) -> GradientBuffer: ...
    def put_gradient(self, slice_: int, rank: int, buffer: GradientBuffer) -> None: ...
    def put_value(self, slice_: int, buffer: GradientBuffer, *, step: int = 0) -> None: ...
    def install_value(self, slice_: int) -> None: ...
    def values(self, slice_: int) -> memoryview: ...


CheckGradient = Callable[[torch.Tensor, str, str, int], None]
"""Of a gradient: whose it is, which parameter's and of which step; may raise."""


class Slices:
    """Owns pushes, values and pulls of slices; ``names`` are the parameters', by slice."""

    kinds = frozenset({Kind.PUSH, Kind.VALUE, Kind.PULL})

    def __init__(
        self,
        machine: SliceMachine,
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
        self._arrived: Callable[[PushArrived], None] | None = None
        self._begins: Callable[[Connection, int], None] | None = None
        self._incoming: dict[int, GradientBuffer] = {}  # by peer, what is arriving
        executor.doers[InstallValue] = _done_already

    def room(self, peer: Connection, header: Header) -> memoryview:
        kind, slice_ = header.kind, header.slice
        if kind == Kind.PULL:
            return nothing(header)
        self._machine.owned(slice_)
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
            if self._arrived is not None:
                self._arrived(event)
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
        """Of a frame to a worker."""
        if frame.kind == Kind.REPLY and not frame.flags & Flag.UNCHANGED:
            return self._store.values(frame.slice)
        return EMPTY

    def watch(self, begins: Callable[[Connection, int], None]) -> None:
        """``begins`` is told of the first push of each step of a peer."""
        self._begins = begins

    def note_arrivals(self, arrived: Callable[[PushArrived], None]) -> None:
        """``arrived`` is told of each push, with the lock held."""
        self._arrived = arrived

    # What it waits for.
    def __contains__(self, number: int) -> bool:
        """All that is not another collector's: its errors are those of a slice."""
        return True

    def incomplete(self) -> Sequence[tuple[int, int]]:
        return self._machine.incomplete()

    def describe_wait(self, number: int, step: int) -> str:
        return self._machine.describe_wait(number, step)


def _done_already(_: InstallValue) -> None:
    """With the lock held, see `Slices._on_value`."""


_SLICE_UPDATED = SliceUpdated()


class SettingsAt(Protocol):
    """The optimizer's numbers. Called with the lock held."""

    def __call__(self, step: int, ranks: Sequence[int] = ()) -> tuple[Hyperparameters, ...]:
        """For an update of this step, by these ranks' gradients."""


class Updates:
    """Makes the update, or the average, that is under way. In whichever thread comes first."""

    def __init__(
        self,
        machine: Machine,
        executor: Executor,
        store: SliceStore,
        settings_at: SettingsAt,
        names: Sequence[str],
    ) -> None:
        self._coefficient = 1.0
        self._machine = machine
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

    def use_coefficient(self, coefficient: float) -> None:
        """For the gradients of the step whose updates are under way."""
        self._coefficient = coefficient

    def note_updates(self, updated: Callable[[int], None]) -> None:
        """``updated`` is told of each slice that is updated, with the lock held."""
        self._updated = updated

    def _update(self, update: UpdateSlice) -> Sequence[object]:
        """Do the one update that is under way; returns what follows from it."""
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
            about = (slice_, ranks, groups, self._coefficient)
            self._store.update(*about, step=step, counted=update.counted)
        if self._trace is not None:
            self._note_updated(self._trace, update, started_ns)
        with self._lock:
            if self._updated is not None:
                self._updated(update.slice)
            return self._machine.handle(finished)

    def _send_squares(self, known: SendSquares) -> None:
        about = Header(Kind.NORM_PART, 0, 0, known.step, 0, CONTROL_PRIORITY, 0)
        self._executor.answer_all(Kind.NORM_PART, about, encode_square_sums(known.squares))

    # For the trace.
    def _note_updated(self, trace: TraceRecorder, update: UpdateSlice, started_ns: int) -> None:
        name = self._names[update.slice]
        place = {"step": update.step, "slice_": update.slice}
        trace.span(Stage.UPDATED.value, name, started_ns, **place)
        # the step before may still be asked for, when its reply has left
        self._updated_ns.pop((update.slice, update.step - 2), None)
        self._updated_ns[update.slice, update.step] = trace.now_ns()

    # Replies.
    def payload_of(self, frame: SendFrame) -> memoryview:
        """Of a frame to a worker."""
        if frame.flags & Flag.UNCHANGED:
            return EMPTY
        data, self._leaving[frame.peer] = self._store.reading(frame.slice)
        return data

    @property
    def told(self) -> Mapping[Kind, Sent]:
        """Who is told of frames that have left."""
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
