"""One connection: frames leave one at a time, and what arrives goes to who owns its kind.

Workers, servers and relays are connections and services. Each kind of frame has exactly one owner,
so that to add a frame, or a feature, is to add a service. What a session does not use is not even
imported: see `Later`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.wire import (
    MAX_CONTROL_BYTES,
    DamagedPayload,
    Flag,
    Frame,
    FrameReader,
    Header,
    Kind,
    encode_header,
    sealed,
)
from foreprop.engine.stream import Stream, load_checksum
from foreprop.errors import (
    Failure,
    InternalError,
    PeerLost,
    RemoteProtocolError,
    TransportError,
    decode_failure,
)


class Service(Protocol):
    """Part of a session: handles the frames of some kinds, in connections' receiving threads."""

    @property
    def kinds(self) -> frozenset[Kind]: ...

    def room(self, peer: Connection, header: Header) -> memoryview:
        """Memory for a frame's payload: see `core.wire.Destination`."""

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None: ...


class ConnectionOwner(Protocol):
    """Learns what becomes of a connection, in its receiving thread."""

    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        """The error for a frame of a kind that nobody owns."""

    def on_lost(self, peer: Connection, why: str) -> None:
        """The connection has ended; without a reason if the other side has closed it."""

    def on_refused(self, peer: Connection, error: RemoteProtocolError) -> None:
        """The other side has broken the protocol."""

    def on_error(self, peer: Connection, error: BaseException) -> None:
        """Something of ours has failed while a frame was handled."""


class Connection:
    """Frames to and from one peer.

    ``sender`` is this side's rank or index in frames, ``whose`` what messages call the other side's
    number: rank or server.
    """

    def __init__(
        self,
        stream: Stream,
        owners: Mapping[int, Service],
        *,
        sender: int,
        whose: str,
        give_up_s: float,
        rank: int = -1,
        number: int = -1,
    ) -> None:
        self.stream = stream
        self.owners = owners
        """The owner of each kind of frame; it may change as the other side gets known."""
        self.rank = rank
        """The other side's number in its frames, or -1 until it is known."""
        self.number = number
        """The other side's number in the session (`core.frames`), or -1 until it takes part."""
        self.last_push: tuple[int, int] | None = None
        """The slice or shard, and its step, that the other side has pushed last."""
        self.left = False
        """Whether the other side has said goodbye."""
        self.silent = False
        """Whether nothing more leaves but what passes the queue."""
        self.ended = False
        """Whether nothing more is read."""
        self.receive_started_ns = 0
        """When the last frame's header was here."""
        self.sent_bytes = 0
        """Bytes sent, with headers, but for frames that have passed the queue."""
        self.received_bytes = 0
        self._awaiting_resend: dict[int, tuple[Service, Frame] | None] = {}
        """Slices whose push is to come again, each with the pull that has come behind it."""
        self._sender = sender
        self._whose = whose
        self._give_up_s = give_up_s
        self._sending = threading.Lock()  # frames never interleave, not even the last one

    @property
    def joined(self) -> bool:
        """Whether the other side takes part: before that nothing it says touches the session."""
        return self.number >= 0

    @property
    def last_step(self) -> int:
        return 0 if self.last_push is None else self.last_push[1]

    # Receiving.
    def receive(self, listener: ConnectionOwner) -> None:
        """Read until the connection ends, and tell the listener how it did."""
        owner: Service | None = None  # of the frame under way, whatever `owners` is by its end

        def room(header: Header) -> memoryview:
            nonlocal owner
            self.receive_started_ns = time.perf_counter_ns()
            if header.rank != self.rank >= 0:
                raise RemoteProtocolError(
                    f"{self._whose} {self.rank} sent a frame of {self._whose} {header.rank}"
                )
            owner = self.owners.get(header.kind)
            if owner is None:
                raise listener.refusal(self, header)
            return owner.room(self, header)

        reader = FrameReader(room, self.stream.checksum)
        try:
            while received := self.stream.receive_into(reader.buffer):
                self.received_bytes += received
                try:
                    frame = reader.advance(received)
                except DamagedPayload as damage:
                    self._request_resend(damage)
                    continue
                if frame is None or owner is None:
                    continue
                if self._awaiting_resend and frame.header.slice in self._awaiting_resend:
                    self._handle_resend(owner, frame)
                else:
                    owner.on_frame(self, *frame)
        except PeerLost as error:  # not this connection's end, but a session's
            listener.on_error(self, error)
        except TransportError as error:
            listener.on_lost(self, str(error))
        except RemoteProtocolError as error:
            listener.on_refused(self, error)
        except BaseException as error:
            listener.on_error(self, error)
        else:
            listener.on_lost(self, "")
        self.ended = True

    def _request_resend(self, damage: DamagedPayload) -> None:
        """Ask for a damaged push again; raises if nothing but damage can be the reason.

        Another backward pass may have added to the gradient after its checksum was made. It will be
        averaged again then, so this push does not matter. The other side knows: it sends the
        gradient as it is now, or ends the session.
        """
        header = damage.header
        if header.kind != Kind.PUSH or not header.flags & Flag.GRADIENT:
            raise damage
        place = {"step": header.step, "slice_": header.slice}
        self.send_past_queue(Kind.DAMAGED, damage.question.encode(), **place)
        self._awaiting_resend[header.slice] = None

    def _handle_resend(self, owner: Service, frame: Frame) -> None:
        """Hand on a frame of a slice whose push is to come again; a pull waits for that push."""
        kind, slice_ = frame.header.kind, frame.header.slice
        if kind == Kind.PULL and self._awaiting_resend[slice_] is None:
            self._awaiting_resend[slice_] = owner, frame
            return
        held = self._awaiting_resend.pop(slice_) if kind == Kind.PUSH else None
        owner.on_frame(self, *frame)
        if held is not None:
            behind, pull = held
            behind.on_frame(self, *pull)

    # Sending.
    def send(
        self, kind: int, flags: int, step: int, slice_: int, priority: int, payload: memoryview
    ) -> None:
        """Block until the frame is with the kernel; raises `TransportError`."""
        header = encode_header(kind, flags, self._sender, step, slice_, priority, len(payload))
        header = sealed(header, payload, self.stream.checksum)
        with self._sending:
            if self.silent:
                return
            self.stream.send(header, payload)
        self.sent_bytes += len(header) + len(payload)

    def send_past_queue(
        self, kind: int, data: bytes = b"", *, step: int = 0, slice_: int = 0
    ) -> None:
        """Send before the queue's head, which may be just what everybody waits for.

        A connection that is stuck in the middle of a frame is given up soon.
        """
        place = (step, slice_, CONTROL_PRIORITY, len(data))
        header = encode_header(kind, 0, self._sender, *place)
        header = sealed(header, data, self.stream.checksum)
        if not self._sending.acquire(timeout=self._give_up_s):
            return
        try:
            self.stream.send(header, memoryview(data))
        except TransportError:
            return  # the receiving thread has seen it, too
        finally:
            self._sending.release()

    def start_sending_past_queue(
        self, name: str, kind: int, data: bytes = b"", *, step: int = 0, slice_: int = 0
    ) -> threading.Thread:
        """`send_past_queue` in a thread of its own, for whoever cannot wait, or not for long."""
        place = {"step": step, "slice_": slice_}
        thread = threading.Thread(
            target=self.send_past_queue, args=(kind, data), kwargs=place, name=name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            return done_here(thread)
        return thread


class DoneThread(threading.Thread):
    """Stands for a thread whose work has been done."""

    def join(self, timeout: float | None = None) -> None:
        del timeout


def done_here(thread: threading.Thread) -> DoneThread:
    """Do the work of a thread that did not start; it must end by itself soon.

    Python 3.12 starts none while it shuts down, which is when a session that is still open ends.
    """
    thread.run()
    return DoneThread(name=thread.name)


EMPTY = memoryview(b"")


class Collecting(Protocol):
    """A service that waits for pushes: of slices, or of shards of rows."""

    def __contains__(self, number: int) -> bool: ...

    def incomplete(self) -> Sequence[tuple[int, int]]:
        """Each (number, step) that only some peers have pushed. With the lock held."""

    def describe_wait(self, number: int, step: int) -> str:
        """What a slice or shard waits for at this step, in words. With the lock held."""


class Receivers(dict[int, Service]):
    """The owner of each kind of frame that a process receives."""

    def add(self, *services: Service) -> None:
        """Add services of kinds that nobody has yet; raises `InternalError` if one has two."""
        for service in services:
            for kind in service.kinds:
                other = self.setdefault(kind, service)
                if other is not service:
                    names = " and ".join(type(each).__name__ for each in (other, service))
                    raise InternalError(f"frames of kind {kind.name} have two owners: {names}")

    def put_before(self, service: Service) -> None:
        """Have a service own its kinds, which hands on to the owners that it was made with."""
        self.update(dict.fromkeys(service.kinds, service))


S = TypeVar("S", bound=Service)


class Later(Generic[S]):
    """A service that is made, and its module imported, when somebody first needs it.

    It can own its kinds without being there: then its first frame makes it.
    """

    def __init__(self, kinds: Iterable[Kind], make: Callable[[], S]) -> None:
        self.kinds = frozenset(kinds)
        self.made: S | None = None
        self._make = make
        self._lock = threading.Lock()

    @property
    def service(self) -> S:
        with self._lock:
            if self.made is None:
                self.made = self._make()
            return self.made

    def room(self, peer: Connection, header: Header) -> memoryview:
        return self.service.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self.service.on_frame(peer, header, payload)


class BoundedService:
    """A service whose frames carry at most ``limit_bytes``; its memory for them."""

    limit_bytes = 0

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, self.limit_bytes) if self.limit_bytes else nothing(header)


class FailureReports(BoundedService):
    """Owns the frames by which the other side says why the session has failed."""

    kinds = frozenset({Kind.FAILURE})
    limit_bytes = MAX_CONTROL_BYTES

    def __init__(self, on_failure: Callable[[Connection, Failure], None]) -> None:
        self._on_failure = on_failure

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self._on_failure(peer, decode_failure(payload))


# Room for payloads.
def check_size(header: Header, size_bytes: int) -> None:
    if header.payload_bytes != size_bytes:
        raise RemoteProtocolError(
            f"{Kind(header.kind).name} of slice {header.slice} carries {header.payload_bytes}"
            f" bytes, not {size_bytes}"
        )


def exactly(header: Header, size_bytes: int) -> memoryview:
    check_size(header, size_bytes)
    return memoryview(bytearray(size_bytes))


def bounded(header: Header, limit_bytes: int) -> memoryview:
    if header.payload_bytes > limit_bytes:
        raise RemoteProtocolError(
            f"{Kind(header.kind).name} of {header.payload_bytes} bytes; at most {limit_bytes}"
        )
    # untouched memory: who only says that much will come takes none
    return np.empty(header.payload_bytes, np.uint8).data


def nothing(header: Header) -> memoryview:
    if header.payload_bytes:
        raise unexpected_bytes(header)
    return EMPTY


def unexpected_bytes(header: Header) -> RemoteProtocolError:
    return RemoteProtocolError(f"{Kind(header.kind).name} carries {header.payload_bytes} bytes")


def greeting(session_id: str, rank: int) -> bytes:
    """The first frame on a connection to a server or relay."""
    return unencrypted(Kind.HELLO, rank, session_id.encode())


def unencrypted(kind: Kind, sender: int, data: bytes = b"") -> bytes:
    """A whole frame that is sent before a connection is encrypted, if it ever is."""
    header = encode_header(kind, 0, sender, 0, 0, CONTROL_PRIORITY, len(data))
    return sealed(header, data, load_checksum()) + data
