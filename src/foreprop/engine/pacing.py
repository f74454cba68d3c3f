"""Links of a chosen rate inside one machine, without touching the kernel's network.

A `Link` is one direction of a node's network interface, shared by all processes of the node. It
is a virtual clock in a shared file: whoever sends occupies the link for the time that the bytes
take at its rate, and sleeps until then.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import tempfile
import threading
import time
from pathlib import Path

from foreprop.engine.stream import Stream
from foreprop.errors import TransportError

_CHUNK_BYTES = 32 * 1024
_SLACK_S = 0.002
"""How far the clock may lag behind: makes up for sleeps that end late."""
_CLOCK = struct.Struct("d")


class Link:
    """One direction of an emulated network interface; ``rate_bits_per_s`` counts payload."""

    def __init__(self, rate_bits_per_s: float, path: Path) -> None:
        self.seconds_per_byte = 8.0 / rate_bits_per_s
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.descriptor = os.open(path, flags, 0o600)
            # the folder is everybody's: another user's file may be what changes under our hands
            found = os.fstat(self.descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                os.close(self.descriptor)
                raise PermissionError(errno.EPERM, "another user's, or no ordinary file")
        except OSError as error:  # of a link, a pipe, another user's
            raise TransportError(
                f"the emulated link {path} is no file of ours ({error.strerror}): remove it"
            ) from error
        os.ftruncate(self.descriptor, _CLOCK.size)
        self._clock = mmap.mmap(self.descriptor, _CLOCK.size)
        self._lock = threading.Lock()

    def occupy(self, size_bytes: int) -> None:
        """Block until ``size_bytes`` would have passed behind everything before them."""
        with self._lock:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            now = time.monotonic()
            (free_at,) = _CLOCK.unpack_from(self._clock)
            done_at = max(free_at, now - _SLACK_S) + size_bytes * self.seconds_per_byte
            _CLOCK.pack_into(self._clock, 0, done_at)
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        if done_at > now:
            time.sleep(done_at - now)

    def close(self) -> None:
        self._clock.close()
        os.close(self.descriptor)


class PacedStream(Stream):
    """Bytes that pass the node's links; frames are sent in chunks.

    Sending blocks until the link is free, so it needs no `bound`.
    """

    def __init__(self, stream: Stream, *, egress: Link, ingress: Link) -> None:
        self.checksum = stream.checksum
        self._stream = stream
        self._egress = egress
        self._ingress = ingress

    def send(self, header: bytes, payload: memoryview) -> None:
        first = payload[:_CHUNK_BYTES]
        self._egress.occupy(len(header) + len(first))
        self._stream.send(header, first)
        for start in range(_CHUNK_BYTES, len(payload), _CHUNK_BYTES):
            chunk = payload[start : start + _CHUNK_BYTES]
            self._egress.occupy(len(chunk))
            self._stream.send(b"", chunk)

    def receive_into(self, view: memoryview) -> int:
        received = self._stream.receive_into(view[:_CHUNK_BYTES])
        if received:
            self._ingress.occupy(received)
        return received

    def close(self) -> None:
        self._stream.close()


class NodeLinks:
    """The emulated network interface of one node, shared by its processes."""

    def __init__(self, session_id: str, node: int, workers_per_node: int, rate: float) -> None:
        self._paths = _link_paths(session_id, node)
        self._links = [Link(rate, path) for path in self._paths]
        self._node = node
        self._workers_per_node = workers_per_node

    def wrap(self, stream: Stream, rank: int) -> Stream:
        """Put the links around a stream to a worker, unless it is on the same node."""
        return self.wrap_to_node(stream, rank // self._workers_per_node)

    def wrap_to_node(self, stream: Stream, node: int) -> Stream:
        if node == self._node:
            return stream
        egress, ingress = self._links
        if stream.pace(egress.descriptor, ingress.descriptor, egress.seconds_per_byte):
            return stream
        return PacedStream(stream, egress=egress, ingress=ingress)

    def unlink(self) -> None:
        """Remove the files' names once every process of the node has opened them."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        for link in self._links:
            link.close()


def _link_paths(session_id: str, node: int) -> list[Path]:
    folder = Path(tempfile.gettempdir())
    return [folder / f"foreprop-{session_id}-{node}-{way}" for way in ("egress", "ingress")]


def unlink_links(session_id: str, node: int | None) -> None:
    """Remove what a node that has died on the way may have left."""
    if node is not None:
        for path in _link_paths(session_id, node):
            path.unlink(missing_ok=True)
