"""Connections that have not said who they are: a few, for a short time, without a thread.

The thread that accepts connections reads what they say, a fixed number of bytes at most: with a
secret the two messages of `core.authentication`, then in any case a greeting, the first frame. Who
has said it gets a `Connection` and a thread; nothing else of a stranger's is ever kept.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from foreprop.config import LOGGER, Config
from foreprop.core.authentication import (
    NO_SECRET,
    NONCE_BYTES,
    AcceptingSide,
    Channel,
    Subject,
    describe_one_sided,
    maybe_rank_opening,
)
from foreprop.core.wire import (
    HEADER_BYTES,
    Checksum,
    Header,
    Kind,
    check_header,
    check_payload,
    decode_header,
)
from foreprop.engine.connection import unencrypted
from foreprop.engine.secret import load_key
from foreprop.engine.stream import SocketStream, Stream, load_checksum
from foreprop.errors import Failure, HandshakeError, InternalError, RemoteProtocolError

MAX_GREETING_BYTES = 256
GREETING_S = 10.0
"""How long a stranger may take: a worker greets as soon as it is connected."""
MAX_STRANGERS = 64
"""How many strangers may stay at one time, each for `GREETING_S` at most."""
_REPORTS = 100
"""How many strangers are reported: those who keep coming do not fill the log."""


class Greeting(NamedTuple):
    """A whole greeting, on a connection that waits for whoever reads on.

    ``sock`` does not block.
    """

    sock: socket.socket
    address: str
    header: Header
    payload: memoryview
    channel: Channel | None = None
    """What both ends have proved, where a secret has been shown."""

    @property
    def name(self) -> str:
        """Who the peer says it is, for messages."""
        return f"rank {self.header.rank} at {self.address}"


def stream_of(whole: Greeting, config: Config) -> Stream:
    """A blocking stream to a peer that has greeted; if encrypted, its first user shakes hands."""
    whole.sock.setblocking(True)
    name = whole.name
    if config.encryption is None or whole.header.kind == Kind.SERVERS:
        return SocketStream(whole.sock, name)
    if whole.channel is None:
        raise InternalError(f"{name} is to be encrypted, and has not been authenticated")
    from foreprop.engine.encrypted import EncryptedStream

    return EncryptedStream(whole.sock, name, whole.channel, config, accepts=True)


@dataclass(slots=True, eq=False)
class Stranger:
    """A connection that has not greeted yet; ``side`` is for the secret, if one must be shown."""

    sock: socket.socket
    address: str
    side: AcceptingSide | None
    came_at_s: float = field(default_factory=time.monotonic)
    header: Header | None = None
    _head: bytes = b""
    _got: bytes = b""
    _checksum: Checksum = field(default_factory=load_checksum)

    @property
    def has_opened(self) -> bool:
        return self.side is not None and self.side.has_opened

    def read(self) -> Greeting | None:
        """Read what is there; returns the greeting when it is whole.

        Raises EOFError at the connection's end, BlockingIOError when nothing more is there,
        `RemoteProtocolError` and `HandshakeError` for what may not be.
        """
        side = self.side
        while side is not None and side.wanted:
            if reply := side.receive(self._receive(side.wanted)):
                self.send(reply)
            if side.refused is not None:
                raise HandshakeError(side.refused)
        while self.header is None:
            self._got += self._receive(HEADER_BYTES - len(self._got))
            if len(self._got) == HEADER_BYTES:
                self.header = self._decode(self._got)
                self._head, self._got = self._got, b""
        while (missing := self.header.payload_bytes - len(self._got)) > 0:
            self._got += self._receive(missing)
        check_payload(self._head, self.header, self._got, self._checksum)
        channel = None if side is None else side.channel
        return Greeting(self.sock, self.address, self.header, memoryview(self._got), channel)

    def _receive(self, wanted: int) -> bytes:
        data = self.sock.recv(wanted)
        if not data:
            raise EOFError
        return data

    def send(self, data: bytes) -> None:
        """Send a few bytes, for which the kernel has room unless nobody reads them."""
        if self.sock.send(data) != len(data):
            raise EOFError

    def _decode(self, got: bytes) -> Header:
        rank = maybe_rank_opening(got)
        if rank is not None:
            self.send(NO_SECRET)
            raise HandshakeError(describe_one_sided(rank, "this server"))
        header = decode_header(got)
        check_header(got, self._checksum)
        if header.kind not in (Kind.HELLO, Kind.SERVERS, Kind.PULSE):
            raise RemoteProtocolError(f"the first frame is {Kind(header.kind).name}, not HELLO")
        if self.side is not None and self.side.is_question != (header.kind == Kind.SERVERS):
            raise RemoteProtocolError(f"{Kind(header.kind).name} is not what it has opened for")
        if header.payload_bytes > MAX_GREETING_BYTES:
            raise RemoteProtocolError(
                f"{Kind(header.kind).name} of {header.payload_bytes} bytes; at most"
                f" {MAX_GREETING_BYTES}"
            )
        if self.side is not None and header.rank != self.side.rank:
            raise RemoteProtocolError(f"rank {self.side.rank} greets as rank {header.rank}")
        return header


class Entrance:
    """The entrance of one server or relay, called in its accepting thread.

    ``name`` is for messages; ``subject`` is what a connection is authenticated for. With a
    ``secret_file`` who connects must show that it has the secret. A stranger may stay for
    ``limit_s``, and `GREETING_S` at most. Raises `ConfigError` for a bad file, and where the
    package for checksums is missing.
    """

    def __init__(
        self, name: str, index: int, subject: Subject, secret_file: str | None, limit_s: float
    ) -> None:
        self.refused = ""
        """Why the last peer without this secret was refused, in words, for messages."""
        self._name = name
        self._index = index
        self._subject = subject
        self._key: bytes | None = None
        load_checksum()  # or say now what is missing
        if secret_file is not None:
            self._key = load_key(secret_file)
        self._limit_s = min(GREETING_S, limit_s)
        self._strangers: dict[Stranger, None] = {}  # in the order in which they came
        self._selector: selectors.BaseSelector | None = None
        self._reports = 0

    def open(self, selector: selectors.BaseSelector) -> None:
        """Register strangers at this selector from now on, with themselves as data."""
        self._selector = selector

    def arrive(self, sock: socket.socket, address: str) -> None:
        """Take in a stranger. Of too many the oldest goes, of those with the least to show."""
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(min(self._strangers, key=lambda each: each.has_opened))
        side = None
        if self._key is not None:
            side = AcceptingSide(self._key, self._subject, secrets.token_bytes(NONCE_BYTES))
        sock.setblocking(False)
        stranger = Stranger(sock, address, side)
        self._strangers[stranger] = None
        if self._selector is not None:
            self._selector.register(sock, selectors.EVENT_READ, stranger)

    def hear(self, stranger: Stranger) -> Greeting | None:
        """Read what a stranger has said; returns its greeting if that is whole now."""
        if stranger not in self._strangers:  # it had to go for another one
            return None
        try:
            greeting = stranger.read()
        except BlockingIOError:
            return None
        except (EOFError, OSError):
            self._dismiss(stranger)
            return None
        except HandshakeError as error:
            self.refused = str(error).replace("this server", self._name)
            self._report(self.refused)
            if (
                self._key is not None and not stranger.has_opened
            ):  # who has none understands a frame
                failure = Failure(kind="HandshakeError", message=self.refused)
                self._tell(stranger, failure.encode())
            self._dismiss(stranger)
            return None
        except RemoteProtocolError as error:
            self._report(f"a stranger broke the protocol: {error}")
            self._dismiss(stranger)
            return None
        self._forget(stranger)
        return greeting

    def _report(self, text: str) -> None:
        self._reports += 1
        if self._reports <= _REPORTS:
            LOGGER.warning("%s: %s", self._name, text)

    def dismiss_silent(self) -> None:
        """Close the connections of strangers that have been here for too long."""
        since_s = time.monotonic() - self._limit_s
        for stranger in [each for each in self._strangers if each.came_at_s < since_s]:
            self._dismiss(stranger)

    def dismiss_all(self, failure: Failure | None) -> None:
        """Close all strangers' connections: the session is over.

        Where no secret is needed, each may be a worker, and is told why.
        """
        for stranger in list(self._strangers):
            if failure is not None and self._key is None:
                self._tell(stranger, failure.encode())
            self._dismiss(stranger)

    def _tell(self, stranger: Stranger, data: bytes) -> None:
        with contextlib.suppress(OSError, EOFError):
            stranger.send(unencrypted(Kind.FAILURE, self._index, data))

    def _dismiss(self, stranger: Stranger) -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):
            stranger.sock.shutdown(socket.SHUT_RDWR)  # what has been sent still arrives
        stranger.sock.close()

    def _forget(self, stranger: Stranger) -> None:
        del self._strangers[stranger]
        if self._selector is not None:
            self._selector.unregister(stranger.sock)

    def __len__(self) -> int:
        return len(self._strangers)
