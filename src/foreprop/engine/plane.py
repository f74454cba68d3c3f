"""The native data plane: gradients and averages of slices without the interpreter.

Theory of operation. What happens once a slice is C++ (`engine/native`): lanes in order of priority,
frames, sums in the order of the ranks, answers. What happens once a session or a step stays Python:
who takes part, what a step is, failures, reports. The plane stands under the connections
(`PlaneStream`): it takes pushes and replies out of what comes, and all other frames pass to whoever
reads the stream, in their order. A rank's own servers are in its process, and its slices at them
pass through memory.

`core` stays the specification. The Python machines decide what is said beside slices; where they
know of a slice only what the plane has done, they ask it (`engine.planeserver`). A session
that asks for what the plane does not carry runs the Python engine: see `engine.native.why_not`.
Frames and bits are the same, so ranks may differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from foreprop.config import Config
from foreprop.core.codec import NONE, codec_of, takes
from foreprop.core.frames import (
    GradientReady,
    NotifyArrived,
    PrioritiesLearned,
    PullsDue,
    ReplyArrived,
    Stage,
    ValuesAwaited,
)
from foreprop.core.manifest import ITEMSIZE_BYTES, Manifest
from foreprop.core.pushwindow import push_window, pushed_bytes
from foreprop.core.sendqueue import Turns, turns_of
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.engine import stream as streams
from foreprop.engine.connection import Connection
from foreprop.engine.memory import Copying, ParameterBytes
from foreprop.engine.native import CODECS, DTYPES, maybe_library
from foreprop.engine.progress import Counters
from foreprop.engine.stream import SocketStream, Stream
from foreprop.engine.trace import TraceRecorder
from foreprop.errors import (
    ForepropError,
    InternalError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TrainingLoopError,
    TransportError,
)

ROLE_WORKER, ROLE_SERVER = 0, 1
_MOST_TEXT = 2048
_MOST_WAIT_MS = 100
"""Whoever waits is back in the interpreter so often, for signals."""
_END_S = 5.0
_MOST_SPANS = 1 << 18
_STAGES = tuple(Stage)
_REPLIES = ("broadcast", "notify", "pull")


class SliceSpan(NamedTuple):
    """A stage of a slice; ``slice_`` is the parameter's number once that is ready."""

    stage: Stage
    slice_: int
    step: int
    priority: int
    peer: int
    size_bytes: int
    start_ns: int
    stop_ns: int


class Plane:
    """One session's, on one rank, with the ``servers`` of these indices in its process.

    Any thread, where nothing else is said. Whoever made it closes it.
    """

    WORKER = -1
    """Whose spans: in the place of a server's index."""

    worker_class: type[PlaneWorker] | None = None
    """Of the worker's machine, where a session has another one."""

    def __init__(self, manifest: Manifest, config: Config, *, rank: int, servers: Sequence[int]):
        library = maybe_library()
        if library is None:
            raise InternalError("the plane was not built")
        self._library = library
        self.slices = manifest.slices()
        self._calls = 0
        self._lock = threading.RLock()
        self._left = threading.Condition(self._lock)
        self._told: dict[int, list[Callable[[SliceSpan], None]]] = {}
        self._drawing = threading.Lock()
        self._lost: Counter[int] = Counter()
        self._copying: list[Copying | None] = [None] * len(manifest.parameters)
        self._descriptors: set[int] = set()
        self._sockets: set[socket.socket] = set()
        numbers = np.array(_numbers(manifest, config, rank, servers), dtype=np.int64)
        names = b"".join(info.name.encode() + b"\0" for info in manifest.parameters)
        self._native: int | None = library.fp_new(numbers.ctypes.data, names)
        if self._native is None:
            raise InternalError(f"the plane does not start: {self._refused()}")
        four = (ctypes.c_int * 4)()
        library.fp_descriptors(self._native, four)
        self._descriptors.update(four)

    def _refused(self) -> str:
        text = ctypes.create_string_buffer(_MOST_TEXT)
        self._library.fp_error(text, _MOST_TEXT)
        return text.value.decode(errors="replace")

    def __enter__(self) -> int | None:  # for each push: a generator takes thrice the time
        """The library's plane, which stays while somebody is in here; None: it is closed."""
        with self._lock:
            self._calls += 1
            return self._native

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._native is None:  # who closes it waits for this
                self._left.notify_all()

    def ask(self, what: str, *about: Any, otherwise: Any = None) -> Any:
        """What the library says to this; ``otherwise`` if the plane has been closed."""
        with self as native:
            return otherwise if native is None else getattr(self._library, what)(native, *about)

    def close(self) -> None:
        """All connections must have been closed, or are now. Waits for who is in a call."""
        for index in list(self._told):
            self.draw(index)
        with self._lock:
            native, self._native = self._native, None
            if native is None:
                return
            self._library.fp_ring(native)
            if self._left.wait_for(lambda: not self._calls, _END_S):
                self._library.fp_free(native)

    def forget_in_child(self) -> None:
        """Let go of the descriptors in a forked child, which has no threads."""
        self._native = None
        for sock in self._sockets:
            sock.close()
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # Connections.
    def worker_stream(
        self, sock: socket.socket, name: str, server: int, most_bytes: int, channel: object = None
    ) -> Stream:
        """The way to a server; ``most_bytes``: see `core.sendqueue.SendBound`, or 0.

        ``channel`` is the connection's where both ends have shown a secret, else None.
        """
        del channel  # for who encrypts
        stream = PlaneStream(self, sock, name, ROLE_WORKER, -1)
        stream.carry(server)
        if most_bytes:
            stream.adapt(most_bytes)
        return stream

    def server_stream(
        self, sock: socket.socket, name: str, index: int, channel: object = None
    ) -> Stream:
        """The way to a rank; it says nothing of slices before `PlaneStream.carry`."""
        del channel
        return PlaneStream(self, sock, name, ROLE_SERVER, index)

    def carry(self, connections: Mapping[int, Connection]) -> None:
        """All ranks take part in a server's session: their slices are the plane's from now on."""
        for rank, connection in connections.items():
            if isinstance(connection.stream, PlaneStream):
                connection.stream.carry(rank)

    def adopt(self, sock: socket.socket, role: int, index: int) -> tuple[int, int]:
        descriptor = os.dup(sock.fileno())
        with self as native:
            if native is None:
                os.close(descriptor)
                raise TransportError("the session has ended")
            self._descriptors.add(descriptor)
            self._sockets.add(sock)
            return int(self._library.fp_adopt(native, role, index, descriptor)), descriptor

    def release(self, sock: socket.socket, number: int, descriptor: int) -> None:
        with self as native:
            self._descriptors.discard(descriptor)
            self._sockets.discard(sock)
            if native is not None:
                self._library.fp_release(native, number)

    def make_worker(
        self, memory: Sequence[ParameterBytes], slices: Sequence[Slice], **about: Any
    ) -> PlaneWorker:
        """The worker's machine; ``about``: as `core.worker_machine.WorkerMachine`'s."""
        return (self.worker_class or PlaneWorker)(self, memory, slices, **about)

    # The training thread's.
    def push(
        self,
        event: GradientReady,
        gradient: memoryview | None,
        room: memoryview,
        copying: Copying | None = None,
    ) -> None:
        """All are used until the parameter is complete: whoever calls keeps them."""
        parameter, step, flags, _ = event
        data = 0 if gradient is None else _address(gradient)
        word, number = (0, 0) if copying is None else copying[:2]
        self._copying[parameter] = copying
        with self as native:
            if native is None:
                raise TransportError("the session has ended")
            about = (native, parameter, step, flags, data, _address(room), word, number)
            if self._library.fp_push(*about):
                raise LocalProtocolError(self._refused())

    def message(
        self,
        peer: int,
        kind: int,
        step: int,
        priority: int,
        slice_: int,
        data: bytes | memoryview,
        flags: int,
        index: int = WORKER,
    ) -> None:
        """Have another frame of the worker's, or a server's, leave in its turn. Any thread."""
        about = (index, peer, int(kind), step, slice_, priority, flags)
        self.ask("fp_message", *about, _address(memoryview(data)), len(data))

    def await_values(self, step: int, rooms: Sequence[memoryview]) -> None:
        addresses = (ctypes.c_void_p * len(rooms))(*map(_address, rooms))
        self.ask("fp_await_values", step, addresses)

    def pulls_due(self) -> None:
        self.ask("fp_pulls_due")

    def learn(self, order: Sequence[int]) -> None:
        numbers = (ctypes.c_int * len(order))(*order)
        if self.ask("fp_learn", numbers, len(order)):
            raise LocalProtocolError(self._refused())

    def is_complete(self, parameter: int) -> bool:
        return bool(self.ask("fp_complete", parameter))

    def is_answered(self, parameter: int) -> bool:
        """Whether any of it has come with values."""
        return bool(self.ask("fp_answered", parameter))

    def wait(self, parameter: int, timeout_s: float) -> None:
        """Return when it is complete, somebody rings, or it is time to look for signals.

        Raises a device's `RuntimeError` if that has failed to copy the gradient.
        """
        if (copying := self._copying[parameter]) is not None:
            copying.check()
        self.ask("fp_wait", parameter, min(_MOST_WAIT_MS, max(1, int(timeout_s * 1000))))

    def ring(self) -> None:
        """Something has happened that whoever waits should look at."""
        self.ask("fp_ring")

    def flush(self, timeout_s: float) -> None:
        """Return when all that was pushed has left, after a time, or when a device has failed."""
        deadline = time.monotonic() + timeout_s
        checks = {each.check for each in self._copying if each is not None}
        with contextlib.suppress(RuntimeError):  # who waits for its copies is told
            while (left_s := deadline - time.monotonic()) > 0:
                for check in checks:
                    check()
                timeout_ms = min(_MOST_WAIT_MS, max(1, int(left_s * 1000)))
                if self.ask("fp_flush", timeout_ms, otherwise=True):
                    return

    # For reports.
    def missing(self, parameter: int) -> list[tuple[int, bool | None]]:
        """Its slices that are not answered, and whether each has left; None: it is being copied."""
        most = len(self.slices)
        numbers, left = (ctypes.c_int * most)(), (ctypes.c_int * most)()
        count = self.ask("fp_missing", parameter, numbers, left, most, otherwise=0)
        return [(numbers[each], (False, True, None)[left[each]]) for each in range(count)]

    def step_of(self, parameter: int) -> int:
        return int(self.ask("fp_step", parameter, otherwise=0))

    def count(self, counters: Counters) -> None:
        numbers = self.statistics()
        counters.pushes, counters.pushed_bytes = numbers[:2]
        counters.replies, counters.reply_bytes, counters.max_queue_depth = numbers[2:5]

    def statistics(self) -> list[int]:
        """Pushes and their bytes, replies and theirs; the most queued, queued, awaited.

        The last two are the bytes of pushes and replies as they were without codecs.
        """
        nine = (ctypes.c_int64 * 9)()
        self.ask("fp_statistics", nine)
        return list(nine)

    # Codecs; ``index`` is a server's, or ``WORKER``.
    def tell_scale(self, index: int, step: int, scale: float) -> None:
        """Have the loss's scale count from this step on: the worker's, or what rank 0 has told."""
        self.ask("fp_tell_scale", index, step, scale)

    # Its servers'.
    def snapshot(self, index: int) -> list[tuple[int, int, Any, Any, dict[int, int]]]:
        """Each slice's number, priority, last round that is done, open round, and its pushes."""
        most, found = 4096, []
        with self as native:
            while native is not None:
                room = np.empty(most, dtype=np.int64)
                size = self._library.fp_snapshot(native, index, room.ctypes.data, most)
                if size <= most:
                    found = room[:size].tolist()
                    break
                most = 2 * size
        at, slices = 0, []
        while at < len(found):
            number, priority, *rounds, count = found[at : at + 7]
            pushed = found[at + 7 : at + 7 + 2 * count]
            done, here = tuple(rounds[:2]), tuple(rounds[2:])
            slices.append(
                (number, priority, done, here, dict(zip(pushed[::2], pushed[1::2], strict=True)))
            )
            at += 7 + 2 * count
        return slices

    def last_push(self, index: int, rank: int) -> tuple[int, int] | None:
        both = (ctypes.c_int64 * 2)(-1)
        self.ask("fp_last_push", index, rank, both)
        return None if both[0] < 0 else (both[0], both[1])

    def peer_left(self, index: int, rank: int) -> None:
        self.ask("fp_left", index, rank)

    def tell_begins(self, index: int) -> None:
        self.ask("fp_tell_begins", index)

    # What has happened to slices.
    def tell(self, index: int, told: Callable[[SliceSpan], None]) -> None:
        """Have it ``told`` by `draw` what happens at a server, or ``WORKER``, from now on."""
        self.draw(index)
        with self._drawing:
            self._told.setdefault(index, []).append(told)

    def draw(self, index: int) -> None:
        """Tell all who are to be told, in this thread."""
        lost = ctypes.c_int64()
        with self._drawing:
            room = np.empty((_MOST_SPANS, 8), dtype=np.int64)
            with self as native:
                if native is None:
                    return
                about = (native, index, room.ctypes.data, _MOST_SPANS, ctypes.byref(lost))
                count = self._library.fp_spans(*about)
            told = self._told.get(index, ())
            for stage, *numbers in room[:count].tolist() if told else ():
                span = SliceSpan(_STAGES[stage], *numbers)
                for each in told:
                    each(span)
        self._lost[index] += lost.value

    def record(self, index: int, trace: TraceRecorder, names: Sequence[str]) -> None:
        """Have a trace record what happens to slices; ``names`` are the parameters'."""

        def note(span: SliceSpan) -> None:
            is_whole = span.stage is Stage.PARAMETER_READY
            parameter = span.slice_ if is_whole else self.slices[span.slice_].parameter
            trace.span(
                span.stage.value,
                names[parameter],
                span.start_ns,
                stop_ns=span.stop_ns,
                step=span.step,
                size_bytes=span.size_bytes,
                slice_=-1 if is_whole else span.slice_,
                priority=span.priority,
                peer=span.peer,
            )

        def draw() -> int:
            self.draw(index)
            return self._lost.pop(index, 0)

        self.tell(index, note)
        trace.draw_from(draw)

    def same_batch(self, index: int) -> int:
        """How many steps all ranks have pushed the same of some slice; 0 once they have not."""
        return int(self.ask("fp_same_batch", index, otherwise=0))


def _numbers(manifest: Manifest, config: Config, rank: int, servers: Sequence[int]) -> list[int]:
    """The setting of a plane with the ``servers`` of these indices, as `fp_new` reads it."""

    def turns(rule: Turns) -> list[int]:
        return [rule.first, rule.at_once, rule.at_least, int(rule.in_order)]

    knobs, workers, slices = manifest.knobs, manifest.most_workers, manifest.slices()
    known = sum(1 << kind for kind in Kind)
    checked = config.encryption is None and streams.load_checksum() is not None
    numbers = [rank, workers, manifest.world_size, int(knobs.elastic)]
    numbers += [len(manifest.parameters), known, int(checked)]
    numbers += [int(knobs.aggregation.reports_nonfinite), config.unsent_bytes]
    numbers += [int(knobs.order == "fifo"), _REPLIES.index(knobs.reply)]
    numbers += turns(turns_of(knobs.lanes, rank, knobs.servers))
    numbers.append(len(servers))
    for index in servers:
        numbers += [index, *turns(turns_of(knobs.lanes, index, len(manifest.peers().present)))]
    about = (manifest, slices, config.push_window_bytes)
    sizes = [] if push_window(*about, servers=knobs.servers) is None else pushed_bytes(*about[:2])
    numbers += [config.push_window_bytes, knobs.servers, len(sizes), *sizes]
    numbers.append(len(knobs.packs))
    for pack in knobs.packs:
        numbers += [len(pack), *pack]
    numbers.append(len(slices))
    reductions, wire_dtypes = manifest.reductions(), manifest.wire_dtypes()
    for piece in slices:
        wire_dtype = wire_dtypes[piece.parameter]
        info = manifest.parameters[piece.parameter]
        own, itemsize = (ITEMSIZE_BYTES[dtype] for dtype in (info.dtype, wire_dtype))
        numbers += [piece.parameter, piece.server, piece.start_elems * own, piece.elems * own]
        numbers += [piece.elems * itemsize, DTYPES[wire_dtype]]
        numbers.append(int(reductions[piece.parameter] == "mean"))
        codec = codec_of(info.name, knobs.compression)
        numbers.append(CODECS[codec if takes(codec, info.shape) else NONE])
        places = manifest.places_of(piece)
        numbers.append(len(places))
        numbers += [edge * itemsize for place in places for edge in place]
    return numbers


def _address(data: memoryview) -> int:
    if not len(data):
        return 0
    if not data.readonly:  # as gradients are, for which this is a third of the time
        return ctypes.addressof(ctypes.c_char.from_buffer(data))
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


class PlaneStream(SocketStream):
    """A connection that the plane reads and writes: what is not of slices passes."""

    def __init__(self, plane: Plane, sock: socket.socket, peer: str, role: int, index: int) -> None:
        super().__init__(sock, peer)
        self._plane = plane
        self._is_paced = False
        self._number, self._descriptor = plane.adopt(sock, role, index)

    def carry(self, peer: int) -> None:
        """Slices to and from this peer are the plane's from now on."""
        self._plane.ask("fp_carry", self._number, peer)

    def adapt(self, most_bytes: int) -> None:
        """Adapt what the kernel may hold to the path, beginning with so much."""
        self._set_bound(waits=False, most_bytes=most_bytes)

    def pace(self, egress: int, ingress: int, seconds_per_byte: float) -> bool:
        self._is_paced = True  # and leaves when the link is free: nothing is left to bound
        self._plane.ask("fp_pace", self._number, egress, ingress, seconds_per_byte)
        return True

    def bound(self, window_bytes: int) -> None:
        if self._is_paced:
            return
        super().bound(window_bytes)
        if self._room is not None:
            self._set_bound(waits=True, most_bytes=0)

    def _set_bound(self, *, waits: bool, most_bytes: int) -> None:
        self._plane.ask("fp_bound", self._number, waits, most_bytes)

    def send(self, header: bytes, payload: memoryview) -> None:
        about = (self._number, header, len(header), _address(payload), len(payload))
        number = self._plane.ask("fp_write", *about, otherwise=errno.EPIPE)
        if number:
            error = OSError(number, os.strerror(number))
            raise TransportError(f"cannot send to {self._peer}: {error}") from error

    def receive_into(self, view: memoryview) -> int:
        """Receive as any stream does; raises also what the plane has against the peer's slices."""
        with self._plane as native:
            if native is None:
                return 0
            room = (ctypes.c_char * len(view)).from_buffer(view)
            got = int(self._plane._library.fp_read(native, self._number, room, len(view)))
            if got:
                return got
            about, text = (ctypes.c_int64 * 2)(), ctypes.create_string_buffer(_MOST_TEXT)
            kind = self._plane._library.fp_end(native, self._number, about, text, _MOST_TEXT)
        raise_end(kind, about[0], about[1], text.value.decode(errors="replace"), self._peer)
        return 0

    def close(self) -> None:
        super().close()
        self._plane.release(self._sock, self._number, self._descriptor)


def raise_end(kind: int, number: int, step: int, text: str, peer: str) -> None:
    """Raise why a connection has ended, if not by a goodbye (`native/connection.hpp`, ``End``)."""
    if kind == 2:
        raise TransportError(f"cannot receive from {peer}: {OSError(number, os.strerror(number))}")
    if kind == 3:
        raise RemoteProtocolError(text)
    if kind == 4:
        from foreprop.core.closing import RanksApart  # servers' alone

        raise RanksApart(text)
    if kind == 5:
        error: ForepropError = TrainingLoopError(text)
        if number >= 0:
            error = PeerLost(text, peer=f"rank {number}", step=step)
        raise error


class PlaneWorker(WorkerMachine):
    """A worker's machine beside the plane: it lets messages and first values leave itself."""

    def __init__(
        self, plane: Plane, memory: Sequence[ParameterBytes], slices: Sequence[Slice], **about: Any
    ) -> None:
        super().__init__(slices, **about)
        self._plane = plane
        self._memory = memory
        self._handlers |= {
            GradientReady: self._push,
            ValuesAwaited: self._await_values,
            PrioritiesLearned: self._learn,
            PullsDue: self._pull,
            ReplyArrived: self._unawaited,
            NotifyArrived: self._unawaited,
        }

    def _push(self, event: GradientReady) -> Sequence[Any]:
        memory = self._memory[event.parameter]
        has_none = event.flags & Flag.NO_GRADIENT
        gradient = None if has_none else memory.lent_gradient()
        self._plane.push(event, gradient, memory.landing_bytes(), memory.copying)
        return ()

    def _await_values(self, event: ValuesAwaited) -> Sequence[Any]:
        self._plane.await_values(event.step, [memory.values for memory in self._memory])
        return ()

    def _learn(self, event: PrioritiesLearned) -> Sequence[Any]:
        self._plane.learn(event.order)
        return super()._on_priorities_learned(event)

    def _pull(self, event: PullsDue) -> Sequence[Any]:
        self._plane.pulls_due()
        return ()

    def _unawaited(self, event: object) -> Sequence[Any]:
        raise InternalError(f"the plane has let {event!r} pass")

    # What is known of slices.
    def is_complete(self, parameter: int) -> bool:
        return self._plane.is_complete(parameter)

    def step_of(self, parameter: int) -> int:
        return self._plane.step_of(parameter)

    def missing_slices(self, parameter: int) -> list[tuple[Slice, bool | None]]:
        missing, owner = self._plane.missing(parameter), self.owner_of
        return [(self._slices[n]._replace(server=owner(n)), left) for n, left in missing]

    @property
    def queue_depth(self) -> int:
        return super().queue_depth + self._plane.statistics()[5]
