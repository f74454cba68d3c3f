"""The process that encrypts for a rank: ``python -m foreprop.engine.encrypting PID FILE SECONDS``.

`engine.encryptedplane` starts it, and hands it connections over its standard input. Of each it
shakes hands; two threads then move bytes, in pieces as they come. It ends with the rank, when what
was given to it has left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time

import msgspec

from foreprop.config import Config
from foreprop.core.authentication import Channel, Subject
from foreprop.core.sendqueue import SendBound
from foreprop.engine.encrypted import EncryptedStream
from foreprop.errors import ForepropError, failure_of

MOST_WORD_BYTES = 1 << 16
OPEN, CLOSED = b"open", b"closed"
"""Words of a connection: hands were shaken; the other end has closed it. All others are failures,
and no word follows `CLOSED` or a failure.
"""
_PIECE_BYTES = 1 << 17
_LOOK_S = 1.0
_DRAIN_S = 2.0
"""How long what was given to it may still take to leave once the rank has ended."""


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A connection that comes with this; ``adapted_bytes``: a `SendBound`'s, or 0."""

    number: int
    peer: str
    session: str
    target: str
    rank: int
    nonces: bytes
    accepts: bool
    adapted_bytes: int


class Bounded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """See `Stream.bound`."""

    number: int
    window_bytes: int


class _Encrypted:
    """A connection, encrypted at ``sock`` and plain at ``plain``."""

    def __init__(
        self,
        about: Connected,
        config: Config,
        sock: socket.socket,
        plain: socket.socket,
        words: socket.socket,
    ) -> None:
        subject = Subject(about.session, about.target, True)
        self.stream = EncryptedStream(
            sock,
            about.peer,
            Channel(subject, about.rank, about.nonces),
            config,
            accepts=about.accepts,
            bound=SendBound(about.adapted_bytes) if about.adapted_bytes else None,
        )
        self._plain = plain
        self._words = words
        self.thread = threading.Thread(target=self._run, name="encrypt", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        decrypting = threading.Thread(target=self._decrypt, name="decrypt", daemon=True)
        try:
            self.stream.open()
            _say(self._words, OPEN)
            decrypting.start()
            piece = memoryview(bytearray(_PIECE_BYTES))
            while got := self._plain.recv_into(piece):
                self.stream.send(b"", piece[:got])
        except Exception as error:  # whatever it is, the rank is told
            _say(self._words, failure_of(error).encode())
        self.stream.close()  # wakes who decrypts
        if decrypting.ident is not None:
            decrypting.join()
        self._plain.close()
        self._words.close()

    def _decrypt(self) -> None:
        piece = memoryview(bytearray(_PIECE_BYTES))
        try:
            while got := self.stream.receive_some(piece):
                self._plain.sendall(piece[:got])
            _say(self._words, CLOSED)
        except Exception as error:
            _say(self._words, failure_of(error).encode())
        with contextlib.suppress(OSError):
            self._plain.shutdown(socket.SHUT_WR)


def _say(words: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):  # the rank has closed it
        words.send(word, socket.MSG_DONTWAIT)


def main() -> None:
    rank, secret_file, join_timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    for each in (signal.SIGINT, signal.SIGTERM):  # for the rank, which may want to save first
        signal.signal(each, signal.SIG_IGN)
    config = Config(encryption="tls", secret_file=secret_file, join_timeout_s=join_timeout_s)
    control = socket.socket(fileno=0)
    decoder = msgspec.json.Decoder(Connected | Bounded)
    connections: dict[int, _Encrypted] = {}
    while True:
        if not select.select([control], [], [], _LOOK_S)[0]:
            if os.getppid() != rank:  # a fork of it may hold the other end, too
                break
            continue
        data, descriptors, *_ = socket.recv_fds(control, MOST_WORD_BYTES, 3)
        if not data:
            break
        about = decoder.decode(data)
        if isinstance(about, Connected):
            ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            try:
                connections[about.number] = _Encrypted(about, config, *ends)
            except ForepropError as error:  # the secret's file has changed
                _say(ends[-1], failure_of(error).encode())
                for end in ends:
                    end.close()
        elif about.number in connections:
            connections[about.number].stream.bound(about.window_bytes)
        ended = [number for number, each in connections.items() if not each.thread.is_alive()]
        for number in ended:
            del connections[number]
    deadline = time.monotonic() + _DRAIN_S
    for connection in connections.values():
        connection.thread.join(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":
    main()
