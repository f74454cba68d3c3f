"""Mutual authentication of a connection by the job's secret, and signed entries of the store.

Both ends prove that they have the secret by challenge and response with a keyed hash, HMAC-SHA256
(RFC 2104), as in the three-pass mutual authentication of ISO/IEC 9798-4. There is one pass more,
because the connecting side speaks first and also proves first: a stranger who connects gets nothing
that secrets could be tried on.

    connecting side   opening     44 bytes: mark, rank, nonce
    accepting side    challenge   40 bytes: mark, nonce
    connecting side   its proof   32 bytes
    accepting side    its proof   32 bytes

A proof is the HMAC of the prover's role, the version, both nonces, the session's id, the target,
whether the connection is encrypted, and the rank. Roles differ, so a proof cannot be sent back to
its maker; nonces are new for each connection, so no proof can be replayed. All sizes are fixed, and
nothing is parsed. The keys of an encrypted connection are derived from the same values and the
secret (`engine.encrypted`): whoever has not taken part in these four messages cannot read it.

This module knows no socket and no clock. Bytes come in, bytes go out; nonces are arguments. Each
side reads ``wanted`` bytes, passes them to ``receive`` and sends what that returns. When ``wanted``
is 0, both ends have proven themselves and ``channel`` says what they have agreed on. After an error
the connection must be closed.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal, NamedTuple

from foreprop.core.wire import HEADER_BYTES, SIGNED, decode_header
from foreprop.errors import ForepropError, HandshakeError, RemoteProtocolError, TransportError

NONCE_BYTES = 32
PROOF_BYTES = 32
LEAST_SECRET_BYTES = 16
_VERSION = b"1"
_MARK_BYTES = 8
_OPENING_MARKS = (b"P3-open" + _VERSION, b"P3-otls" + _VERSION)
_CHALLENGE_MARKS = (b"P3nonce" + _VERSION, b"P3nctls" + _VERSION)
# both pairs: the mark of a side that does not encrypt, and of one that does
_QUESTION_MARK = b"P3-join" + _VERSION  # asks where a session's servers are; never encrypted
_NO_SECRET_MARK = b"P3plain" + _VERSION
_OPENING = struct.Struct(f"!{_MARK_BYTES}sI{NONCE_BYTES}s")
OPENING_BYTES = _OPENING.size
CHALLENGE_BYTES = _MARK_BYTES + NONCE_BYTES
_ADVICE = "set FOREPROP_SECRET_FILE to a copy of the same file on every machine"
_CONNECTS, _ACCEPTS, _ENTRY = b"connects", b"accepts", b"entry"
Way = Literal["to accepting", "to connecting"]
"""A direction of an encrypted connection: each has keys of its own."""

NO_SECRET = _NO_SECRET_MARK.ljust(CHALLENGE_BYTES, b"\0")
"""What a side without a secret answers to an opening, in the challenge's place."""


class Subject(NamedTuple):
    """What a connection is for: the session's id, and the target, as ``server 3``.

    Both sides must mean the same.
    """

    session: str
    target: str
    encrypted: bool = False


QUESTION = Subject("", "a session to be joined")
"""The subject of a connection that only asks where servers are."""


class Channel(NamedTuple):
    """A connection whose ends have proven that they have the secret; nothing in it is secret.

    ``rank`` is the connecting side's; ``nonces`` are the connecting side's and then the other's.
    """

    subject: Subject
    rank: int
    nonces: bytes


class ConnectingSide:
    """A worker that connects to a server, or a relay that does. It sends ``opening`` first.

    ``nonce`` must be `NONCE_BYTES` random bytes that were never used before.
    """

    def __init__(self, key: bytes, subject: Subject, rank: int, nonce: bytes) -> None:
        mark = _QUESTION_MARK if subject == QUESTION else _OPENING_MARKS[subject.encrypted]
        self.opening = _OPENING.pack(mark, rank, nonce)
        self.wanted = CHALLENGE_BYTES
        self.is_challenged = False
        self._key = key
        self._subject = subject
        self._rank = rank
        self._nonces = nonce
        self._got = b""

    @property
    def channel(self) -> Channel:
        return Channel(self._subject, self._rank, self._nonces)

    def receive(self, data: bytes) -> bytes:
        """Take some of the ``wanted`` bytes; returns what to send.

        Raises `HandshakeError` for a side without the secret, or with another one.
        """
        self._got, self.wanted = _add(self._got, data, self.wanted)
        if self.wanted:
            return b""
        got, self._got = self._got, b""
        if not self.is_challenged:
            return self._answer_challenge(got)
        proof = _prove(self._key, _ACCEPTS, self._subject, self._rank, self._nonces)
        if not hmac.compare_digest(got, proof):
            raise self.at_end()
        return b""

    def _answer_challenge(self, challenge: bytes) -> bytes:
        rank, target = self._rank, self._subject.target
        if challenge.startswith(_NO_SECRET_MARK):
            raise HandshakeError(describe_one_sided(rank, target))
        encrypted, mark = self._subject.encrypted, challenge[:_MARK_BYTES]
        if mark == _CHALLENGE_MARKS[not encrypted]:
            raise HandshakeError(describe_encryption(rank, target, encrypted))
        if mark != _CHALLENGE_MARKS[encrypted]:
            raise HandshakeError(
                f"what rank {rank} has reached is not {target}, or another version of foreprop:"
                f" it answers {mark!r}"
            )
        self._nonces += challenge[_MARK_BYTES:]
        self.wanted, self.is_challenged = PROOF_BYTES, True
        return _prove(self._key, _CONNECTS, self._subject, rank, self._nonces)

    def at_end(self) -> ForepropError:
        """The error to raise if the connection ends now, or is silent for too long."""
        rank, target = self._rank, self._subject.target
        if self.is_challenged:
            return HandshakeError(describe_unequal(rank, target))
        return TransportError(f"{target} did not answer rank {rank}, which has connected to it")


class AcceptingSide:
    """A server or relay that is connected to; ``nonce`` is as for `ConnectingSide`.

    ``rank`` is what the other side claims until nothing more is ``wanted``. With ``refused``, the
    reason, what `receive` returned is still to be sent before the connection is closed.
    """

    def __init__(self, key: bytes, subject: Subject, nonce: bytes) -> None:
        self.rank = -1
        self.has_opened = False
        self.refused: str | None = None
        self.wanted = OPENING_BYTES
        self._key = key
        self._subject = subject
        self._nonce = nonce
        self._nonces = b""
        self._got = b""

    @property
    def channel(self) -> Channel:
        return Channel(self._subject, self.rank, self._nonces)

    @property
    def is_question(self) -> bool:
        return self._subject == QUESTION

    def receive(self, data: bytes) -> bytes:
        """Take some of the ``wanted`` bytes; returns what to send.

        Raises `HandshakeError` for a worker without the secret or with another one, and
        `RemoteProtocolError` for anything else.
        """
        self._got, self.wanted = _add(self._got, data, self.wanted)
        if not self.has_opened:
            self._check_mark()
        if self.wanted:
            return b""
        got, self._got = self._got, b""
        if not self.has_opened:
            mark, self.rank, nonce = _OPENING.unpack(got)
            self._nonces = nonce + self._nonce
            self.wanted, self.has_opened = PROOF_BYTES, True
            if mark == _QUESTION_MARK:
                self._subject = QUESTION
                return _CHALLENGE_MARKS[False] + self._nonce
            encrypted = self._subject.encrypted
            if mark != _OPENING_MARKS[encrypted]:  # the challenge's mark tells the other side
                self.refused = describe_encryption(self.rank, self._subject.target, not encrypted)
                self.wanted = 0
            return _CHALLENGE_MARKS[encrypted] + self._nonce
        about = (self._subject, self.rank, self._nonces)
        if not hmac.compare_digest(got, _prove(self._key, _CONNECTS, *about)):
            raise HandshakeError(describe_unequal(self.rank, self._subject.target))
        return _prove(self._key, _ACCEPTS, *about)

    def _check_mark(self) -> None:
        # refused as soon as possible: the frame of a side without a secret may be shorter than an
        # opening, and more bytes would never come
        mark = self._got[:_MARK_BYTES]
        if any(known.startswith(mark) for known in (*_OPENING_MARKS, _QUESTION_MARK)):
            return
        if len(self._got) < HEADER_BYTES:
            return
        rank = decode_header(self._got[:HEADER_BYTES]).rank
        raise HandshakeError(
            f"rank {rank} has no secret, {self._subject.target} has one: {_ADVICE}"
        )


def maybe_rank_opening(data: bytes | bytearray) -> int | None:
    """The rank in an opening, of which ``data`` has at least `HEADER_BYTES`; None if it is none."""
    if not data.startswith((*_OPENING_MARKS, _QUESTION_MARK)):
        return None
    return int.from_bytes(data[_MARK_BYTES : _MARK_BYTES + 4], "big")


def describe_one_sided(rank: int, target: str) -> str:
    return f"rank {rank} has a secret, {target} has none: {_ADVICE}"


def describe_encryption(rank: int, target: str, connecting_encrypts: bool) -> str:
    sides = (f"rank {rank}", target)
    who, who_not = sides if connecting_encrypts else sides[::-1]
    return (
        f"{who} encrypts and {who_not} does not: set encryption (or FOREPROP_ENCRYPTION) to the"
        " same on every machine"
    )


def describe_unequal(rank: int, target: str) -> str:
    return f"rank {rank} and {target} have different secrets, or mean different sessions: {_ADVICE}"


def key_of(secret: bytes) -> bytes:
    """The 32-byte key that every function here takes; line ends after the secret do not count.

    Raises ValueError for a secret that is too short.
    """
    secret = secret.rstrip(b"\r\n")
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"{len(secret)} bytes; it must be at least {LEAST_SECRET_BYTES}")
    return hashlib.sha256(b"foreprop" + _VERSION + secret).digest()


def token_of(key: bytes, purpose: str, size_bytes: int) -> bytes:
    """Up to 32 bytes that nobody without the secret knows, always the same for one purpose."""
    return _mac(key, b"token", purpose.encode())[:size_bytes]


def seed_of(key: bytes, channel: Channel, way: Way) -> bytes:
    """The 32 secret bytes that both ends of a connection make the keys of one direction from."""
    about = (channel.subject, channel.rank, channel.nonces)
    return _prove(key, b"seed " + way.encode(), *about)


# The store.
def sign(key: bytes, name: str, value: bytes) -> bytes:
    """An entry for the store that nobody without the key can make, or use under another name."""
    return SIGNED + _mac(key, _ENTRY, name.encode(), value) + value


def maybe_signed(key: bytes, name: str, entry: bytes) -> bytes | None:
    """The value in an entry; None if it is not signed with this key for this name."""
    head = len(SIGNED) + PROOF_BYTES
    value = entry[head:]
    made = SIGNED + _mac(key, _ENTRY, name.encode(), value)
    return value if hmac.compare_digest(entry[:head], made) else None


def _prove(key: bytes, role: bytes, subject: Subject, rank: int, nonces: bytes) -> bytes:
    about = (subject.session.encode(), subject.target.encode(), rank.to_bytes(4, "big"))
    return _mac(key, role, nonces, *about, b"tls" if subject.encrypted else b"")


def _mac(key: bytes, *parts: bytes) -> bytes:
    # with the parts' sizes: otherwise other parts could give the same bytes
    sizes = struct.pack(f"!{len(parts)}Q", *map(len, parts))
    return hmac.digest(key, b"".join((_VERSION, sizes, *parts)), "sha256")


def _add(got: bytes, data: bytes, wanted: int) -> tuple[bytes, int]:
    if len(data) > wanted:
        raise RemoteProtocolError(f"{len(data)} bytes where {wanted} were to come")
    return got + data, wanted - len(data)
