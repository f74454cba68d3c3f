"""What a server and its session know of each other, and of each connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from foreprop.core.frames import SendFrame
from foreprop.core.manifest import Manifest
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.failure import Failure
from foreprop.link.stream import Stream
from foreprop.observe.trace import TraceRecorder
from foreprop.path.slicestore import GradientBuffer

HYPERPARAMETERS_LIMIT_BYTES = 1 << 20


class Peer:
    """One connection of a server, to a worker or a relay, and what is arriving on it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.sending = threading.Lock()  # frames never interleave, not even the last one
        self.rank = -1
        """In its frames, once it has greeted; of a relay that of its first worker."""
        self.number = -1
        """Among the server's peers (`core.peers`), once its manifest is known."""
        self.manifest: Manifest | None = None
        self.incoming: GradientBuffer | None = None
        self.last_push: tuple[int, int] | None = None  # (slice, step)
        self.left = False
        self.connected_at_s = time.monotonic()
        self.receive_started_ns = 0

    @property
    def joined(self) -> bool:
        """Whether it takes part: before that nothing it says touches the session."""
        return self.number >= 0

    @property
    def last_step(self) -> int:
        return 0 if self.last_push is None else self.last_push[1]


class ServedSession(Protocol):
    """What becomes of the frames of a session that has started. Any thread."""

    @property
    def names(self) -> Sequence[str]:
        """The parameters', by number of the slice or shard."""

    def start(self) -> None:
        """All peers have said the same hello."""

    def destination(self, peer: Peer, header: Header) -> memoryview:
        """Where a frame's payload goes, see `core.wire.Destination`."""

    def on_frame(self, peer: Peer, header: Header, payload: memoryview) -> None: ...

    def next_after_sent(self, peer: int) -> list[SendFrame]:
        """What may follow, to this peer or to others; called with the server's lock held."""

    def payload_of(self, frame: SendFrame) -> memoryview:
        """Of a frame without a token, which is about to be sent."""

    def on_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        """For the trace."""

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        """(slice, step, what it waits for) of what some peers have pushed and others not."""

    def close(self, failure: Failure | None) -> None:
        """The session is over: let go of all that is not the server's own."""


class SessionHost(Protocol):
    """What a session needs of its server."""

    @property
    def index(self) -> int:
        """The server's number."""

    @property
    def lock(self) -> threading.RLock:
        """The server's one lock."""

    @property
    def trace(self) -> TraceRecorder | None: ...

    def submit(self, frame: SendFrame) -> None:
        """Hand a frame to the link of its peer."""

    def keep(self, data: bytes | memoryview) -> int:
        """The token of a frame with this payload."""

    def take(self, token: int) -> bytes | memoryview:
        """The payload that was kept under this token, once."""

    def tell(self, peer: Peer, kind: int, about: Header, data: bytes) -> None:
        """Send past the queue, whose head may be just what everybody waits for."""

    def sending_to(self) -> list[int]: ...
    def fail(self, failure: Failure) -> None: ...
    def broke(self, error: BaseException) -> None:
        """A thread has met an error that nobody expects."""

    def end(self) -> None: ...


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


def which_blob(header: Header, manifest: Manifest) -> int:
    if header.slice >= len(manifest.blob_bytes):
        raise RemoteProtocolError(f"there is no blob {header.slice}")
    return header.slice
