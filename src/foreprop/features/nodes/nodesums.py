"""A relay's sums: a node's gradients of a slice become one push; its answer goes to all workers.

The receiving thread that takes in the node's last push of a slice adds the gradients up: in rank
order, in float32 for gradients in half precision. The sum is pushed on in the type in which they
came. Rank 0's values are passed on as they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    SERVER,
    Finish,
    NotifyArrived,
    ReplyArrived,
    SendFrame,
    Stage,
)
from foreprop.core.manifest import Manifest
from foreprop.core.relay_machine import PassedUpwards
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import EMPTY, Connection, bounded, exactly
from foreprop.engine.executor import Encode, Executor, Pipeline
from foreprop.engine.memory import bytes_of
from foreprop.engine.slices import SettingsAt, Slices
from foreprop.engine.sums import Buffers, Extent, GradientBuffer, add_up, sum_dtype
from foreprop.engine.tensors import DTYPES
from foreprop.engine.trace import RelayStage
from foreprop.errors import RemoteProtocolError, TransportError


class NodeSums:
    """Makes the sums, and receives the server's welcome and its answers to the node's pushes."""

    kinds = frozenset({Kind.WELCOME, Kind.REPLY, Kind.NOTIFY})

    def __init__(
        self,
        machine: ServerMachine[PassedUpwards],
        executor: Executor,
        store: RelayStore,
        settings_at: SettingsAt,
        names: Sequence[str],
        link: Connection,
    ) -> None:
        self.has_left = False
        self._machine = machine
        self._executor = executor
        self._lock = executor.lock
        self._store = store
        self._settings_at = settings_at
        self._names = names
        self._link = link
        self._trace = executor.host.trace
        self._leaving: GradientBuffer | None = None  # the sum that is under way to the server
        executor.doers[UpdateSlice] = self._make_sum
        executor.doers[Finish] = self._leave

    # From the server.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind != Kind.REPLY:
            return bounded(header, 0)
        if not self._machine.closing.awaits(header.slice, header.step):
            raise RemoteProtocolError(
                f"server {peer.rank} sent a reply for slice {header.slice}, step"
                f" {header.step}, which is not awaited"
            )
        if header.flags & Flag.UNCHANGED:
            return exactly(header, 0)
        return self._store.room(header.slice, header.payload_bytes)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        slice_, step = header.slice, header.step
        if header.kind == Kind.WELCOME:
            self._executor.answer_all(Kind.WELCOME, header)
            return
        if header.kind == Kind.NOTIFY:
            self._executor.dispatch(NotifyArrived(slice_, step, SERVER, header.flags))
            return
        with self._lock:
            self._store.land(slice_, payload)
        self._span(Stage.REPLY_RECEIVED, header, peer.receive_started_ns)
        self._executor.dispatch(ReplyArrived(slice_, step, SERVER, header.priority, header.flags))

    # What the executor does.
    def _make_sum(self, asked: UpdateSlice) -> Sequence[object]:
        started_ns = time.perf_counter_ns()
        if asked.ranks and not asked.gradient:
            with self._lock:
                self._settings_at(asked.step, ())
        self._store.add_up(asked.slice, asked.ranks)
        about = Header(Kind.PUSH, 0, 0, asked.step, asked.slice, 0, 0)
        self._span(RelayStage.NODE_SUMMED, about, started_ns)
        with self._lock:
            self._store.keep_sum_only(asked.slice)
            return self._machine.handle(SliceUpdated())

    def _leave(self, _: Finish) -> None:
        # every worker of the node has said goodbye, and all its frames have been passed on
        self.has_left = True
        with contextlib.suppress(TransportError):  # the link's thread has seen it, too
            self._link.send(Kind.BYE, 0, 0, 0, CONTROL_PRIORITY, EMPTY)

    # The sending threads.
    def pipeline(self, slices: Slices, encode: Encode | None) -> Pipeline:
        """``slices`` has what goes to workers."""
        return Pipeline(
            payload={
                Kind.PUSH: self._take_payload,
                Kind.VALUE: self._take_payload,
                Kind.REPLY: slices.payload_of,
            },
            encode={} if encode is None else {Kind.PUSH: encode},
            sent={Kind.PUSH: self._note_sent, Kind.REPLY: self._note_sent},
        )

    def _take_payload(self, frame: SendFrame) -> memoryview:
        with self._lock:
            if frame.kind == Kind.VALUE:
                return self._store.take_value(frame.slice, frame.step)
            self._leaving = self._store.take_sum(frame.slice)
            return self._leaving.view if self._leaving is not None else EMPTY

    def _note_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        peer, kind, step, slice_, priority, flags, _ = frame
        if kind == Kind.REPLY:
            about = Header(kind, flags, peer, step, slice_, priority, size_bytes)
            self._span(Stage.REPLY_SENT, about, started_ns)
            return
        about = Header(kind, flags, 0, step, slice_, priority, size_bytes)
        self._span(Stage.PUSH_SENT, about, started_ns)
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            with self._lock:
                self._store.give(leaving)

    def _span(self, stage: Stage | RelayStage, about: Header, started_ns: int) -> None:
        if self._trace is not None:
            self._trace.slice_span(stage, self._names[about.slice], about, started_ns)


@dataclass(slots=True, eq=False)
class _Relayed:
    elems: int
    dtype: torch.dtype
    wire_dtype: torch.dtype
    gradients: dict[int, GradientBuffer] = field(default_factory=dict)  # by worker
    total: GradientBuffer | None = None  # their sum, until it is pushed on
    # rank 0's values by step, until they are passed on
    offered: dict[int, GradientBuffer] = field(default_factory=dict)
    answers: memoryview | None = None  # memory for what the server sends
    values: memoryview = EMPTY  # what the workers' replies carry


class RelayStore:
    """A relay's tensors: its workers' gradients, their sums, and the server's answers.

    Methods are called with the relay's lock held, but for `add_up`: one thread at a time.
    """

    def __init__(self, manifest: Manifest, slices: Sequence[Slice], server: int) -> None:
        dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        self._slices = {
            piece.number: _Relayed(
                piece.elems, dtypes[piece.parameter], wire_dtypes[piece.parameter]
            )
            for piece in slices
            if piece.server == server
        }
        slices_bytes = sum(map(self.size_bytes, self._slices))
        self._buffers = Buffers(slices_bytes)
        self.give = self._buffers.give

    # From the workers.
    def size_bytes(self, slice_: int, *, value: bool = False) -> int:
        """The size of a gradient, in the wire's type, or of a value, which comes in full."""
        relayed = self._slices[slice_]
        return relayed.elems * (relayed.dtype if value else relayed.wire_dtype).itemsize

    def take_buffer(self, slice_: int, *, value: bool = False) -> GradientBuffer:
        """Memory for a gradient or a value; see `size_bytes`."""
        relayed = self._slices[slice_]
        dtype = relayed.dtype if value else relayed.wire_dtype
        # sums are the same without padding: each element's is rounded by itself
        return self._buffers.take(Extent(0, relayed.elems, relayed.elems), dtype)

    def put_gradient(self, slice_: int, worker: int, buffer: GradientBuffer) -> None:
        self._slices[slice_].gradients[worker] = buffer

    def put_value(self, slice_: int, buffer: GradientBuffer, *, step: int = 0) -> None:
        """Keep rank 0's values until they are passed on; those of step 0 may still be here."""
        self._slices[slice_].offered[step] = buffer

    def install_value(self, slice_: int) -> None:
        """Give rank 0's values of the start to the other workers of this node, too."""
        relayed = self._slices[slice_]
        relayed.values = relayed.offered[0].view

    def add_up(self, slice_: int, workers: Sequence[int]) -> None:
        """Add up the gradients of ``workers``, in that order, in the memory of the first one's."""
        relayed = self._slices[slice_]
        if not workers:
            return
        buffers = [relayed.gradients[worker] for worker in workers]
        first = buffers[0].tensor
        dtype = sum_dtype(first.dtype, workers=len(workers))
        total = add_up([buffer.tensor for buffer in buffers], dtype)
        if total is not first:
            first.copy_(total)
        relayed.total = buffers[0]

    # To the server.
    def keep_sum_only(self, slice_: int) -> None:
        """Give back the gradients that `add_up` has read."""
        relayed = self._slices[slice_]
        for buffer in relayed.gradients.values():
            if buffer is not relayed.total:
                self._buffers.give(buffer)
        relayed.gradients.clear()

    def take_sum(self, slice_: int) -> GradientBuffer | None:
        """The sum, which is pushed on now, and then given back."""
        relayed = self._slices[slice_]
        total, relayed.total = relayed.total, None
        return total

    def take_value(self, slice_: int, step: int) -> memoryview:
        return self._slices[slice_].offered.pop(step).view

    # From the server, and back to the workers.
    def room(self, slice_: int, size_bytes: int) -> memoryview:
        """Memory for an answer: in full, as before the first update, or in the wire's type.

        Its last answer has been read by every worker: each has pushed the next step since. Raises
        `RemoteProtocolError` for any other size.
        """
        relayed = self._slices[slice_]
        full_bytes = self.size_bytes(slice_, value=True)
        if size_bytes not in (full_bytes, self.size_bytes(slice_)):
            raise RemoteProtocolError(
                f"a reply for slice {slice_} carries {size_bytes} bytes, not {full_bytes}"
            )
        if relayed.answers is None:
            relayed.answers = bytes_of(torch.zeros(relayed.elems, dtype=relayed.dtype))
        return relayed.answers[:size_bytes]

    def land(self, slice_: int, answer: memoryview) -> None:
        """Have the workers' replies carry an answer that has come into its `room`."""
        if len(answer):
            self._slices[slice_].values = answer

    def values(self, slice_: int) -> memoryview:
        return self._slices[slice_].values
