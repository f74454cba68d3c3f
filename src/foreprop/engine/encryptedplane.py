"""The native plane over encrypted connections, which a process of its own encrypts.

Theory of operation. The plane reads and writes sockets, and knows no TLS. Once both ends have shown
the secret, a connection goes to a process (`engine.encrypting`), and the plane has one end of a
pair of sockets instead. The process sends and expects what `engine.encrypted` does in a rank
without the plane, so ranks may differ. The training's interpreter takes no part. Besides bytes
there are words: that hands were shaken, and why a connection has ended, which is said before the
plane sees it end. Without a word the process itself has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence

import msgspec

from foreprop.config import Config, child_environment
from foreprop.core.authentication import Channel
from foreprop.core.manifest import Manifest
from foreprop.engine.encrypting import CLOSED, MOST_WORD_BYTES, OPEN, Bounded, Connected
from foreprop.engine.plane import ROLE_SERVER, ROLE_WORKER, Plane, PlaneStream
from foreprop.engine.secret import secret_file_of
from foreprop.engine.stream import Stream
from foreprop.errors import InternalError, PeerLost, TransportError, decode_failure

_PAIR_BYTES = 1 << 15
"""What a pair may hold, by half: what is in it leaves in the order of its coming."""
_END_S = 4.0
_WORD_S = 5.0


class EncryptedPlane(Plane):
    """A plane whose connections are encrypted, and the process that does it."""

    def __init__(self, manifest: Manifest, config: Config, *, rank: int, servers: Sequence[int]):
        super().__init__(manifest, config, rank=rank, servers=servers)
        self._timeout_s = config.join_timeout_s
        self._numbers = itertools.count()
        self._streams: weakref.WeakSet[EncryptedPlaneStream] = weakref.WeakSet()
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        about = (str(os.getpid()), secret_file_of(config), str(config.join_timeout_s))
        with its:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", "foreprop.engine.encrypting", *about),
                stdin=its.fileno(),
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is for the workers
            )

    def worker_stream(
        self, sock: socket.socket, name: str, server: int, most_bytes: int, channel: object = None
    ) -> Stream:
        stream = self._stream(sock, name, ROLE_WORKER, -1, channel, most_bytes)
        try:
            stream.wait(2 * self._timeout_s)
        except BaseException:
            stream.close()
            raise
        stream.carry(server)
        return stream

    def server_stream(
        self, sock: socket.socket, name: str, index: int, channel: object = None
    ) -> Stream:
        return self._stream(sock, name, ROLE_SERVER, index, channel)

    def _stream(
        self,
        sock: socket.socket,
        name: str,
        role: int,
        index: int,
        channel: object,
        adapted_bytes: int = 0,
    ) -> EncryptedPlaneStream:
        """Have the process encrypt a connection."""
        if not isinstance(channel, Channel):
            raise InternalError(f"{name} is to be encrypted, and has not been authenticated")
        subject, rank, nonces = channel
        about = Connected(
            number=next(self._numbers),
            peer=name,
            session=subject.session,
            target=subject.target,
            rank=rank,
            nonces=nonces,
            accepts=role == ROLE_SERVER,
            adapted_bytes=adapted_bytes,
        )
        plain, its = socket.socketpair()
        words, its_words = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its, its_words:
            for end in (plain, its):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PAIR_BYTES)
            descriptors = [each.fileno() for each in (sock, its, its_words)]
            self.tell_process(about, descriptors)
        stream = EncryptedPlaneStream(self, plain, name, role, index, about.number, sock, words)
        self._streams.add(stream)
        return stream

    def tell_process(self, about: Connected | Bounded, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # it has ended, which no word says as well
            socket.send_fds(self._control, [msgspec.json.encode(about)], descriptors)

    def close(self) -> None:
        super().close()
        self._control.close()
        try:  # what it has been given leaves first
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait()

    def forget_in_child(self) -> None:
        super().forget_in_child()
        self._control.close()
        for stream in list(self._streams):
            stream.forget_in_child()


class EncryptedPlaneStream(PlaneStream):
    """A connection of which the plane has the ``plain`` bytes, and the process the connection."""

    def __init__(
        self,
        plane: EncryptedPlane,
        plain: socket.socket,
        peer: str,
        role: int,
        index: int,
        number: int,
        connection: socket.socket,
        words: socket.socket,
    ) -> None:
        super().__init__(plane, plain, peer, role, index)
        self.checksum = None  # TLS has its own, which nobody can forge
        self._encrypted_plane, self._process_number = plane, number
        self._connection = connection  # this process's copy: its address is asked for
        self._words = words
        self._is_closed = False

    def wait(self, timeout_s: float) -> None:
        """Wait until hands were shaken; raises `TransportError` if they were not."""
        if (word := self._hear(timeout_s)) != OPEN:
            self._raise(word)

    def bound(self, window_bytes: int) -> None:
        if not self._is_paced:
            about = Bounded(number=self._process_number, window_bytes=window_bytes)
            self._encrypted_plane.tell_process(about)

    def receive_into(self, view: memoryview) -> int:
        try:
            if received := super().receive_into(view):
                return received
        except PeerLost:  # a session's end, not this connection's
            raise
        except TransportError:
            pass
        while (word := self._hear(_WORD_S)) == OPEN:
            pass
        if word != CLOSED and not self._is_closed:
            self._raise(word)
        return 0

    def _hear(self, timeout_s: float) -> bytes:
        with contextlib.suppress(OSError):
            self._words.settimeout(timeout_s)
            return self._words.recv(MOST_WORD_BYTES)
        return b""

    def _raise(self, word: bytes) -> None:
        if word:
            raise decode_failure(word).as_error()
        raise TransportError(
            f"the connection to {self._peer} has ended with the process that encrypts it"
        )

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._words.shutdown(socket.SHUT_RDWR)  # wakes who waits for one
        super().close()
        self.forget_in_child()

    def forget_in_child(self) -> None:
        self._words.close()
        self._connection.close()
