"""The job's secret: read from its file, shown on connections, and signing what the store has.

What others than the job's own processes wrote into the store does not count.
Loaded only where ``secret_file`` is set.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import time
from collections.abc import Callable

from foreprop.config import LOGGER, Config
from foreprop.core.authentication import (
    NONCE_BYTES,
    Channel,
    ConnectingSide,
    Subject,
    key_of,
    maybe_signed,
    sign,
)
from foreprop.core.wire import SIGNED
from foreprop.errors import ConfigError, HandshakeError, TransportError

_MOST_BYTES = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LOOK_S = 1.0


def load_key(path: str) -> bytes:
    """The key made of a secret's file; raises `ConfigError` that says what to do."""
    return key_of(read_secret(path))


def secret_file_of(config: Config) -> str:
    """The setting ``secret_file``; raises `ConfigError` if it is None."""
    if config.secret_file is None:
        raise ConfigError("secret_file is None; this needs the job's secret")
    return config.secret_file


def read_secret(path: str) -> bytes:
    """The 16 to 4,096 bytes of a secret's file; raises `ConfigError`.

    The file must be for its owner alone, as ssh demands of its keys.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & _OTHERS:
                raise ConfigError(
                    f"secret_file is {path!r}, which others than its owner may use (mode"
                    f" {mode:o}): chmod 600 {path}"
                )
            secret = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"secret_file is {path!r}, which cannot be read: {error.strerror}; make it with:"
            f" (umask 077 && openssl rand -hex 32 > {path})"
        ) from error
    if len(secret) > _MOST_BYTES:
        raise ConfigError(f"secret_file is {path!r}, which has more than {_MOST_BYTES} bytes")
    try:
        key_of(secret)
    except ValueError as error:
        raise ConfigError(f"secret_file is {path!r}, which has {error}") from error
    return secret


def authenticate(
    sock: socket.socket,
    config: Config,
    session_id: str,
    target: str,
    rank: int,
    deadline_s: float,
    look: Callable[[], None],
) -> Channel:
    """Show the other end that this one has the secret, and see that it has it, too.

    Else the socket is closed. A server with many strangers before it may close one that it has not
    answered: that is a `TransportError`, after which it may be tried again. Raises `HandshakeError`
    if secrets differ.
    """
    subject = Subject(session_id, target, config.encryption is not None)
    key = load_key(secret_file_of(config))
    side = ConnectingSide(key, subject, rank, secrets.token_bytes(NONCE_BYTES))
    try:
        prove(sock, side, deadline_s, look)
    except BaseException:
        sock.close()
        raise
    return side.channel


def prove(
    sock: socket.socket, side: ConnectingSide, deadline_s: float, look: Callable[[], None]
) -> None:
    """Exchange both ends' proofs of the secret; ``deadline_s`` is of `time.monotonic`.

    Raises `HandshakeError` if they have not the same, `TransportError` if there is no answer.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(_LOOK_S)
    try:
        sock.sendall(side.opening)
        while side.wanted:
            try:
                data = sock.recv(side.wanted)
            except TimeoutError:
                look()
                if time.monotonic() >= deadline_s:
                    raise side.at_end() from None
                continue
            if not data:
                raise ConnectionResetError("closed")
            if reply := side.receive(data):
                sock.sendall(reply)
        sock.settimeout(None)
    except TransportError:  # which is an OSError
        raise
    except OSError as error:
        look()  # the session may have failed: that is the better reason
        raise side.at_end() from error


# The store.
_REPORTS = 5
"""How many entries are reported: a stranger who writes many does not fill the log."""


class Seal:
    """Signs what a part of the store is given, and opens what it has.

    ``scope`` is that part's name, so that an entry counts in no other. Any thread.
    """

    def __init__(self, key: bytes, scope: str, who: str) -> None:
        self._key = key
        self._scope = scope
        self._who = who
        self._refused: dict[str, str] = {}
        """What was wrong with an entry at the last look, by key."""

    def sign(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return sign(self._key, f"{self._scope}/{key}", data)

    def maybe_open(self, key: str, entry: bytes | None) -> bytes | None:
        """An entry's value; None if there is none that counts: it may still come."""
        value = None if entry is None else maybe_signed(self._key, f"{self._scope}/{key}", entry)
        if value is not None:
            self._refused.pop(key, None)
        elif entry is not None:
            signed, known = entry.startswith(SIGNED), key in self._refused
            why = self._refused[key] = "signed with another secret" if signed else "not signed"
            if not known and len(self._refused) <= _REPORTS:
                LOGGER.warning(
                    "%s: the store's entry %r is %s, and does not count: a rank without this job's"
                    " secret (FOREPROP_SECRET_FILE), another job at the same rendezvous, or a"
                    " stranger wrote it",
                    *(self._who, key, why),
                )
        return value

    def check_refused(self, key: str) -> None:
        """Raise `HandshakeError` if an entry that was waited for in vain is there, unsigned."""
        if why := self._refused.get(key):
            raise HandshakeError(
                f"{self._who} has a secret, and the store's entry {key!r} is {why}: set"
                " FOREPROP_SECRET_FILE to a copy of the same file on every machine. If it is set"
                " everywhere, another job meets at the same rendezvous: give this one another port"
            )
