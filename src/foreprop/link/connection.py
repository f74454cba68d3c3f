"""One connection: frames leave one at a time, and what arrives goes to who owns its kind.

Workers, servers and relays are connections and services (`path.services`); what is alike about
reading, sending, errors and goodbyes is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Protocol

from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.wire import FrameReader, Header, encode_header
from foreprop.errors import RemoteProtocolError, TransportError
from foreprop.link.stream import Stream


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
        """The other side's in the session (`core.peers`), or -1 until it takes part."""
        self.last_push: tuple[int, int] | None = None
        """What it has pushed last, for messages: slice or shard, and step."""
        self.left = False
        """It has said goodbye."""
        self.silent = False
        """Nothing more leaves but what passes the queue."""
        self.connected_at_s = time.monotonic()
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

        reader = FrameReader(room)
        try:
            while received := self.stream.receive_into(reader.buffer):
                self.received_bytes += received
                frame = reader.advance(received)
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

    # Sending.
    def send(
        self, kind: int, flags: int, step: int, slice_: int, priority: int, payload: memoryview
    ) -> None:
        """Block until the frame is with the kernel; raises `TransportError`."""
        header = encode_header(kind, flags, self._sender, step, slice_, priority, len(payload))
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
        thread = threading.Thread(
            target=self.send_past_queue,
            args=(kind, data),
            kwargs={"step": step, "slice_": slice_},
            name=name,
            daemon=True,
        )
        thread.start()
        return thread
