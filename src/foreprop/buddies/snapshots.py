"""Copies of slices' states: a server makes and sends them, and its buddy's worker holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from foreprop.core.buddy import HeldStates, KeepState, SnapshotHeld, StateKept, StateReplaced
from foreprop.core.frames import CONTROL_PRIORITY, SendFrame
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, FrameOwner, bounded, nothing
from foreprop.path.tensors import state_limit_bytes

if TYPE_CHECKING:
    from foreprop.path.executor import Executor
    from foreprop.path.worker import WorkerEngine


class Snapshots:
    """Owns word of what the buddy holds; ``export_state`` copies a slice's state."""

    kinds = frozenset({Kind.SNAPSHOT_HELD})

    def __init__(self, executor: Executor, export_state: Callable[[int], bytes]) -> None:
        self._executor = executor
        self._export_state = export_state
        self._kept: dict[int, tuple[int, bytes]] = {}  # by slice, until it is held: step and state
        executor.doers[KeepState] = self._keep

    def _keep(self, kept: KeepState) -> None:
        """In the thread that has updated the slice; it is not updated again before this ends."""
        self._kept[kept.slice] = kept.step, self._export_state(kept.slice)
        self._executor.dispatch(StateKept(*kept))

    def payload_of(self, frame: SendFrame) -> memoryview:
        """Of a snapshot."""
        step, state = self._kept.get(frame.slice, (frame.step, b""))
        # a frame that a later one follows is empty
        return memoryview(state if step == frame.step else b"")

    def room(self, peer: Connection, header: Header) -> memoryview:
        return nothing(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        slice_, step = header.slice, header.step
        self._executor.dispatch(SnapshotHeld(peer.number, slice_, step))
        with self._executor.lock:
            if self._kept.get(slice_, (-1, b""))[0] == step:
                del self._kept[slice_]


class LoadedStates:
    """Owns optimizer state that workers send, and passes it on: the buddy needs that, too."""

    kinds = frozenset({Kind.STATE, Kind.STATE_PULL})

    def __init__(self, executor: Executor, inner: FrameOwner) -> None:
        self._executor = executor
        self._inner = inner

    def room(self, peer: Connection, header: Header) -> memoryview:
        return self._inner.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self._inner.on_frame(peer, header, payload)
        if header.kind == Kind.STATE and not header.flags & Flag.AVERAGES:
            self._executor.dispatch(StateReplaced(header.slice))


class HeldSnapshots:
    """Owns snapshots of other nodes' slices, on the worker that is their buddy."""

    kinds = frozenset({Kind.SNAPSHOT})

    def __init__(self, engine: WorkerEngine) -> None:
        self.states: HeldStates[memoryview] = HeldStates()
        self.count = 0
        self._engine = engine
        self._slices = engine.slices

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.slice >= len(self._slices) or self._slices[header.slice].server != peer.number:
            raise RemoteProtocolError(
                f"server {peer.number} sent a snapshot of slice {header.slice}, which is not its"
            )
        return bounded(header, state_limit_bytes(self._slices[header.slice].elems))

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if not payload:
            return  # it was dropped before it left
        with self._engine.lock:
            self.states.put(header.slice, header.step, payload)
            self.count += 1
        place = (header.step, CONTROL_PRIORITY, b"")
        self._engine.send_message(peer.number, Kind.SNAPSHOT_HELD, *place, slice_=header.slice)

    @property
    def bytes(self) -> int:
        with self._engine.lock:
            return sum(len(data) for _, _, data in self.states.all())
