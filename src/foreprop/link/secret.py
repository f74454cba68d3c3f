"""The job's secret: read from its file, and proven on a connection that this process makes.

Loaded only where ``secret_file`` is set.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import time
from collections.abc import Callable

from foreprop.config import Config
from foreprop.core.authentication import NONCE_BYTES, Channel, ConnectingSide, Subject, key_of
from foreprop.errors import ConfigError, TransportError

_MOST_BYTES = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LOOK_S = 1.0


def load_key(path: str) -> bytes:
    """The key made of a secret's file; raises `ConfigError` that says what to do."""
    return key_of(read_secret(path))


def secret_file_of(config: Config) -> str:
    """Raises `ConfigError` if there is none."""
    if config.secret_file is None:
        raise ConfigError("secret_file is None; this needs the job's secret")
    return config.secret_file


def read_secret(path: str) -> bytes:
    """What the file holds: 16 bytes or more, and 4,096 at most; raises `ConfigError`.

    It must be for its owner alone, as ssh demands of its keys.
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
    """Return when the other end has shown that it has the secret, too; else it is closed.

    A server with many strangers before it may close one that it has not answered: that is a
    `TransportError`, after which it may be tried again. Raises `HandshakeError` if secrets differ.
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
    """Both ends show that they have the secret; ``deadline_s`` is of `time.monotonic`.

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
