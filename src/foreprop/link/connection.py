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
    FrameReader,
    Header,
    Kind,
    encode_header,
    sealed,
)
from foreprop.errors import (
    Failure,
    InternalError,
    RemoteProtocolError,
    TransportError,
    decode_failure,
)
from foreprop.link.stream import Stream, load_checksum


class FrameOwner(Protocol):
    """Who handles the frames of some kinds. Called in the connection's receiving thread."""

    def room(self, peer: Connection, header: Header) -> memoryview:
        """Where a frame's payload goes, see `core.wire.Destination`."""

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None: ...


class ConnectionOwner(Protocol):
    """Who learns what becomes of a connection. Called in its receiving thread."""

    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        """What to say to a frame of a kind that nobody owns."""

    def on_lost(self, peer: Connection, why: str) -> None:
        """It has ended; without a reason if the other side has closed it."""

    def on_refused(self, peer: Connection, error: RemoteProtocolError) -> None:
        """The other side has broken the protocol."""

    def on_error(self, peer: Connection, error: BaseException) -> None:
        """Something of ours has failed while a frame was handled."""


class Connection:
    """To one peer, over a stream. ``sender`` is this side's rank or index in its frames.

    ``whose`` is what the other side's number is called in messages: rank or server.
    """

    def __init__(
        self,
        stream: Stream,
        owners: Mapping[int, FrameOwner],
        *,
        sender: int,
        whose: str,
        give_up_s: float,
        rank: int = -1,
        number: int = -1,
    ) -> None:
        self.stream = stream
        self.owners = owners
        """By kind; it may change as the other side gets known."""
        self.rank = rank
        """The other side's in its frames, or -1 until it is known."""
        self.number = number
        """The other side's in the session (`core.frames`), or -1 until it takes part."""
        self.last_push: tuple[int, int] | None = None
        """What it has pushed last, for messages: slice or shard, and step."""
        self.left = False
        """It has said goodbye."""
        self.silent = False
        """Nothing more leaves but what passes the queue."""
        self.ended = False
        """Nothing more is read from it."""
        self.receive_started_ns = 0
        """When the last frame's header was here."""
        self.sent_bytes = 0
        """With headers, but for what has passed the queue."""
        self.received_bytes = 0
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
        owner: FrameOwner | None = None  # of the frame under way, whatever `owners` is by its end

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
                    self._ask_again(damage)
                    continue
                if frame is not None and owner is not None:
                    owner.on_frame(self, *frame)
        except TransportError as error:
            listener.on_lost(self, str(error))
        except RemoteProtocolError as error:
            listener.on_refused(self, error)
        except BaseException as error:
            listener.on_error(self, error)
        else:
            listener.on_lost(self, "")
        self.ended = True

    def _ask_again(self, damage: DamagedPayload) -> None:
        """Another backward pass may have added to a gradient after its checksum was made.

        It will be averaged again then, so this one does not matter, and nobody minds that. The
        other side knows: it sends the gradient as it is now, or ends the session. Raises if
        nothing but damage can be the reason.
        """
        header = damage.header
        if header.kind != Kind.PUSH or not header.flags & Flag.GRADIENT:
            raise damage
        place = {"step": header.step, "slice_": header.slice}
        self.send_past_queue(Kind.DAMAGED, damage.question.encode(), **place)

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
        """Not behind the queue's head, which may be just what everybody waits for.

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
        """The same in a thread of its own, for whoever cannot wait, or not for long."""
        place = {"step": step, "slice_": slice_}
        thread = threading.Thread(
            target=self.send_past_queue, args=(kind, data), kwargs=place, name=name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            from foreprop.link.shutdown import done_here

            return done_here(thread)
        return thread


EMPTY = memoryview(b"")


class Service(FrameOwner, Protocol):
    """Part of a session: owns the frames of some kinds."""

    @property
    def kinds(self) -> frozenset[Kind]: ...


class Collecting(Protocol):
    """A service that waits for pushes: of slices, or of shards of rows."""

    def __contains__(self, number: int) -> bool: ...

    def incomplete(self) -> Sequence[tuple[int, int]]:
        """What some peers have pushed and others not: (number, step). With the lock held."""

    def describe_wait(self, number: int, step: int) -> str:
        """What a slice or shard waits for at this step, in words. With the lock held."""


def owners_of(services: Iterable[Service]) -> dict[int, Service]:
    """By kind of frame; raises `InternalError` if one has two owners."""
    owners: dict[int, Service] = {}
    for service in services:
        for kind in service.kinds:
            other = owners.setdefault(kind, service)
            if other is not service:
                names = " and ".join(type(each).__name__ for each in (other, service))
                raise InternalError(f"frames of kind {kind.name} have two owners: {names}")
    return owners


S = TypeVar("S", bound=Service)


class Later(Generic[S]):
    """A service that is made when somebody needs it: its module is then imported, and not before.

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


class FailureReports:
    """The other side says why the session has failed."""

    kinds = frozenset({Kind.FAILURE})

    def __init__(self, on_failure: Callable[[Connection, Failure], None]) -> None:
        self._on_failure = on_failure

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, MAX_CONTROL_BYTES)

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
    """For a frame that has no payload."""
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
