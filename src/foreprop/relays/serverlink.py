"""A relay's connection to its server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.wire import Frame, FrameReader, Header, Kind, encode_header
from foreprop.errors import ForepropError, RemoteProtocolError, TransportError
from foreprop.link.failure import Failure
from foreprop.link.stream import Stream

_EMPTY = memoryview(b"")
_GOODBYE_S = 1.0


class LinkOwner(Protocol):
    """Who reads what the server sends. Called in the link's thread."""

    def destination_above(self, header: Header) -> memoryview:
        """Where a frame's payload goes, see `core.wire.Destination`."""

    def on_frame_above(self, header: Header, payload: memoryview) -> None: ...

    def on_lost(self, why: str) -> None:
        """The connection has ended."""

    def on_error(self, error: BaseException) -> None: ...


class ServerLink:
    """``rank`` is the first of those that the relay stands for; ``server`` is an index."""

    def __init__(self, stream: Stream, *, server: int, rank: int) -> None:
        self.sent_bytes = 0
        """With headers, since the start."""
        self.received_bytes = 0
        self._stream = stream
        self._server = server
        self._rank = rank
        self._sending = threading.Lock()  # frames never interleave
        self._thread: threading.Thread | None = None

    def start(self, owner: LinkOwner) -> None:
        self._thread = threading.Thread(
            target=self._receive, args=(owner,), name="foreprop-relay-receive", daemon=True
        )
        self._thread.start()

    def send(
        self, kind: int, flags: int, step: int, slice_: int, priority: int, payload: memoryview
    ) -> None:
        """Block until the frame is with the kernel; raises `TransportError`."""
        header = encode_header(kind, flags, self._rank, step, slice_, priority, len(payload))
        with self._sending:
            self._stream.send(header, payload)
        self.sent_bytes += len(header) + len(payload)

    def tell(self, kind: int, payload: bytes = b"", *, step: int = 0, slice_: int = 0) -> None:
        """Past the queue, if the link takes it soon; nobody waits for it."""
        header = encode_header(kind, 0, self._rank, step, slice_, CONTROL_PRIORITY, len(payload))
        run = threading.Thread(
            target=self._tell, args=(header, memoryview(payload)), name="foreprop-relay-tell"
        )
        run.daemon = True
        run.start()
        run.join(_GOODBYE_S)

    def _tell(self, header: bytes, payload: memoryview) -> None:
        if not self._sending.acquire(timeout=_GOODBYE_S):
            return  # stuck in the middle of a frame
        try:
            self._stream.send(header, payload)
        except TransportError:
            return  # the receiving thread has seen it, too
        finally:
            self._sending.release()

    def close(self, failure: Failure | None) -> None:
        """End the connection, saying why if there is a reason."""
        if failure is not None:
            self.tell(Kind.FAILURE, failure.encode())
        self._stream.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _receive(self, owner: LinkOwner) -> None:
        torch.set_grad_enabled(False)
        reader = FrameReader(lambda header: self._destination(owner, header))
        try:
            while received := self._stream.receive_into(reader.buffer):
                self.received_bytes += received
                frame = reader.advance(received)
                if frame is not None:
                    self._on_frame(owner.on_frame_above, frame)
        except TransportError as error:
            owner.on_lost(str(error))
        except ForepropError as error:
            owner.on_error(error)
        except BaseException as error:
            owner.on_error(error)
        else:
            owner.on_lost("its connection closed")

    def _destination(self, owner: LinkOwner, header: Header) -> memoryview:
        if header.rank != self._server:
            raise RemoteProtocolError(f"server {self._server} sent a frame of server {header.rank}")
        return owner.destination_above(header)

    @staticmethod
    def _on_frame(take: Callable[[Header, memoryview], None], frame: Frame) -> None:
        take(*frame)
