"""A connection's bytes encrypted and authenticated: TLS 1.3, with keys that only the job can make.

Loaded only where ``encryption`` is set. The two ways of a connection are two TLS connections over
one socket: each end then has one to send with and another one to receive with, and a thread of its
own for each. OpenSSL's objects may not be used by two threads at a time. Nothing but one way's
records follows the handshakes: no session tickets, no alerts, no new keys.

Both ends make the same key pair and certificate for a way, from the secret and from what they have
said to each other to show that they have it (`core.authentication`), and accept no other one. So
nobody who is between them can take part in a handshake, or join two connections. What the records
are encrypted with comes from ephemeral keys, as always in TLS 1.3 (RFC 8446): a secret that becomes
known later does not open what was recorded.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import threading

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from foreprop.config import Config
from foreprop.core.authentication import Channel, Way, seed_of
from foreprop.core.sendqueue import SendBound
from foreprop.engine.secret import load_key, secret_file_of
from foreprop.engine.stream import SocketStream, Stream
from foreprop.errors import InternalError, RemoteProtocolError, TransportError

_RECORD_BYTES = 16_384
"""The most plain text that a record holds."""
_WAYS: tuple[Way, Way] = ("to accepting", "to connecting")
_FIRST_DAY = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_LAST_DAY = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""The date of certificates that do not expire (RFC 5280, 4.1.2.5), whatever clocks say."""
_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


class EncryptedStream(Stream):
    """A stream over TLS; ``accepts`` says that this end has accepted the connection.

    The first to send or receive shakes hands, if `open` has not been called.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        channel: Channel,
        config: Config,
        *,
        accepts: bool,
        bound: SendBound | None = None,
    ) -> None:
        self.ways: list[ssl.SSLSocket] = []
        """The TLS connections of both ways, which a forked child must close, too."""
        self._sock = sock
        self._peer = peer
        self._plain = SocketStream(sock, peer, bound)
        self._key = load_key(secret_file_of(config))
        self._channel = channel
        self._accepts = accepts
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._timeout_s = config.join_timeout_s
        self._opening, self._is_open = threading.Lock(), False
        # no checksum: TLS has its own, which nobody can forge

    def bound(self, window_bytes: int) -> None:
        self._plain.bound(window_bytes)

    def open(self) -> None:
        """Shake hands; raises `TransportError` within ``join_timeout_s`` each way, or sooner."""
        try:
            with self._opening:
                if not self._is_open:
                    self._shake_hands()
                self._is_open = True
        except (OSError, ValueError) as error:
            self.close()
            raise TransportError(
                f"the connection to {self._peer} cannot be encrypted ({_reason(error)}): it has"
                " been lost, or somebody on the path changes what is sent"
            ) from error

    def _shake_hands(self) -> None:
        accepts = self._accepts
        for name in _WAYS:
            context = _context(seed_of(self._key, self._channel, name), accepts=accepts)
            self._sock.getpeername()  # of a lost connection ``wrap_socket`` leaves the copy open
            copy = self._sock.dup()
            way = context.wrap_socket(copy, server_side=accepts, do_handshake_on_connect=False)
            self.ways.append(way)
            way.settimeout(self._timeout_s)
            way.do_handshake()
        for each in (self._sock, *self.ways):
            each.settimeout(None)
        self._in, self._out = self.ways if accepts else reversed(self.ways)

    def send(self, header: bytes, payload: memoryview) -> None:
        if not self._is_open:
            self.open()
        with_header = max(0, _RECORD_BYTES - len(header))
        try:
            with self._sending:
                # one record, and one packet, for a small frame
                self._out.sendall(b"".join((header, payload[:with_header])))
                if len(payload) > with_header:
                    self._out.sendall(payload[with_header:])
            self._plain.after_sending(payload)
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot send to {self._peer}: {_reason(error)}") from error

    def receive_into(self, view: memoryview) -> int:
        received = 0
        while received < len(view) and (more := self.receive_some(view[received:])):
            received += more
        return received

    def receive_some(self, view: memoryview) -> int:
        """Receive what has come of one record: `receive_into` waits for all."""
        if not self._is_open:
            self.open()
        try:
            with self._receiving:
                return self._in.recv_into(view)
        except ssl.SSLError as error:
            if isinstance(error, _ENDS):
                raise TransportError(f"cannot receive from {self._peer}: {error}") from error
            raise RemoteProtocolError(
                f"what has come from {self._peer} is not what was sent ({_reason(error)}): somebody"
                " on the path changes it"
            ) from error
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot receive from {self._peer}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who is blocked, before files close
        with self._opening, self._sending, self._receiving:
            for way in self.ways:
                way.close()
        self._plain.close()


def connect_encrypted(
    sock: socket.socket,
    peer: str,
    channel: Channel | None,
    config: Config,
    bound: SendBound | None = None,
) -> EncryptedStream:
    """Shake hands as the end that has connected; raises with the connection closed."""
    if channel is None:
        raise InternalError(f"{peer} is to be reached encrypted, and has not been authenticated")
    stream = EncryptedStream(sock, peer, channel, config, accepts=False, bound=bound)
    stream.open()
    return stream


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error) or type(error).__name__


def _context(seed: bytes, *, accepts: bool) -> ssl.SSLContext:
    """TLS with the key pair that is made of a seed, and no other at the other end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if accepts:
        context.num_tickets = 0
    key, certificate = _key_pair(seed)
    context.load_verify_locations(cadata=certificate.decode())
    descriptor = os.memfd_create("foreprop-key")  # ssl takes keys from files only
    try:
        os.write(descriptor, key + certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def _key_pair(seed: bytes) -> tuple[bytes, bytes]:
    """The Ed25519 key of a seed, and its certificate, which it has signed itself."""
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "foreprop")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, _FIRST_DAY, _LAST_DAY)
    ).sign(key, None)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
