"""Who has the job's secret: mutual authentication of a connection, and signed entries of the store.

Challenge and response by a keyed hash, HMAC-SHA256 (RFC 2104), as in the three-pass mutual
authentication of ISO/IEC 9798-4. One pass more, because who connects speaks first here and proves
first, too: a stranger who connects gets nothing that he could try secrets on.

    connecting side   opening     44 bytes: mark, rank, nonce
    accepting side    challenge   40 bytes: mark, nonce
    connecting side   its proof   32 bytes
    accepting side    its proof   32 bytes

A proof is the HMAC of the prover's role, the version, both nonces, the session's id, what is
connected to, whether it is encrypted, and the rank. Roles differ, so a proof cannot be sent back to
who made it; nonces are new for each connection, so none can be used again. All sizes are fixed, and
nothing is parsed. Of the same things, and the secret, the keys of an encrypted connection are made
(`link.encrypted`), so that whoever has not taken part in these four messages cannot follow them.

No socket and no clock is known here. Bytes come in, bytes go out; nonces are arguments.
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
"""Of a side that does not encrypt, and of one that does."""
_QUESTION_MARK = b"P3-join" + _VERSION
"""Of who asks where a session's servers are, and does not know it yet. Never encrypted."""
_NO_SECRET_MARK = b"P3plain" + _VERSION
_OPENING = struct.Struct(f"!{_MARK_BYTES}sI{NONCE_BYTES}s")
OPENING_BYTES = _OPENING.size
CHALLENGE_BYTES = _MARK_BYTES + NONCE_BYTES
_ADVICE = "set FOREPROP_SECRET_FILE to a copy of the same file on every machine"
_CONNECTS, _ACCEPTS, _ENTRY = b"connects", b"accepts", b"entry"
Way = Literal["to accepting", "to connecting"]
"""Of an encrypted connection: each has keys of its own."""

NO_SECRET = _NO_SECRET_MARK.ljust(CHALLENGE_BYTES, b"\0")
"""What a side without a secret answers to an opening, in the challenge's place."""


class Subject(NamedTuple):
    """What a connection is for. Both sides must mean the same."""

    session: str
    """Its id."""
    target: str
    """What is connected to, as ``server 3``."""
    encrypted: bool = False


QUESTION = Subject("", "a session to be joined")
"""What a connection is for on which is only asked where servers are."""


class Channel(NamedTuple):
    """A connection whose ends have shown that they have the secret; nothing of this is secret."""

    subject: Subject
    rank: int
    """Of who has connected."""
    nonces: bytes
    """The connecting side's, then the accepting side's."""


class ConnectingSide:
    """A worker's, or a relay's to its server. Send ``opening`` first.

    ``nonce`` must be `NONCE_BYTES` of chance, never used before.
    """

    def __init__(self, key: bytes, subject: Subject, rank: int, nonce: bytes) -> None:
        mark = _QUESTION_MARK if subject == QUESTION else _OPENING_MARKS[subject.encrypted]
        self.opening = _OPENING.pack(mark, rank, nonce)
        self.wanted = CHALLENGE_BYTES
        """So many bytes more are to come before it goes on; 0: each side knows the other."""
        self.is_challenged = False
        self._key = key
        self._subject = subject
        self._rank = rank
        self._nonces = nonce
        self._got = b""

    @property
    def channel(self) -> Channel:
        """When nothing more is ``wanted``."""
        return Channel(self._subject, self._rank, self._nonces)

    def receive(self, data: bytes) -> bytes:
        """Take some of the bytes that are ``wanted``; returns what is to be sent.

        Raises `HandshakeError` for a side without the secret, or with another one. The connection
        must be closed then.
        """
        self._got, self.wanted = _add(self._got, data, self.wanted)
        if self.wanted:
            return b""
        got, self._got = self._got, b""
        if not self.is_challenged:
            return self._answer(got)
        proof = _prove(self._key, _ACCEPTS, self._subject, self._rank, self._nonces)
        if not hmac.compare_digest(got, proof):
            raise self.at_end()
        return b""

    def _answer(self, challenge: bytes) -> bytes:
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
        """What to raise if the connection ends, or is silent for too long, now."""
        rank, target = self._rank, self._subject.target
        if self.is_challenged:
            return HandshakeError(describe_unequal(rank, target))
        return TransportError(f"{target} did not answer rank {rank}, which has connected to it")


class AcceptingSide:
    """A server's or relay's. ``nonce``: as for a `ConnectingSide`."""

    def __init__(self, key: bytes, subject: Subject, nonce: bytes) -> None:
        self.rank = -1
        """Of who connects; proven when nothing more is ``wanted``."""
        self.has_opened = False
        """It has sent a whole opening."""
        self.refused: str | None = None
        """Why it has been answered and must be closed, if so."""
        self.wanted = OPENING_BYTES
        """As a `ConnectingSide`'s."""
        self._key = key
        self._subject = subject
        self._nonce = nonce
        self._nonces = b""
        self._got = b""

    @property
    def channel(self) -> Channel:
        """When nothing more is ``wanted``."""
        return Channel(self._subject, self.rank, self._nonces)

    @property
    def is_question(self) -> bool:
        """Whether it only asks where servers are."""
        return self._subject == QUESTION

    def receive(self, data: bytes) -> bytes:
        """Take some of the bytes that are ``wanted``; returns what is to be sent.

        Raises `HandshakeError` for a worker without the secret or with another one, and
        `RemoteProtocolError` for anything else. The connection must be closed then.
        """
        self._got, self.wanted = _add(self._got, data, self.wanted)
        if not self.has_opened:
            self._check_mark()
        if self.wanted:
            return b""
        got, self._got = self._got, b""
        return self._check_proof(got) if self.has_opened else self._challenge(got)

    def _check_mark(self) -> None:
        """As soon as it can be known: a frame may be shorter than an opening."""
        mark = self._got[:_MARK_BYTES]
        if any(known.startswith(mark) for known in (*_OPENING_MARKS, _QUESTION_MARK)):
            return
        if len(self._got) < HEADER_BYTES:
            return
        rank = decode_header(self._got[:HEADER_BYTES]).rank
        raise HandshakeError(
            f"rank {rank} has no secret, {self._subject.target} has one: {_ADVICE}"
        )

    def _challenge(self, opening: bytes) -> bytes:
        mark, self.rank, nonce = _OPENING.unpack(opening)
        self._nonces = nonce + self._nonce
        self.wanted, self.has_opened = PROOF_BYTES, True
        if mark == _QUESTION_MARK:
            self._subject = QUESTION
            return _CHALLENGE_MARKS[False] + self._nonce
        encrypted = self._subject.encrypted
        if mark != _OPENING_MARKS[encrypted]:  # the challenge says so to the other side
            self.refused = describe_encryption(self.rank, self._subject.target, not encrypted)
            self.wanted = 0
        return _CHALLENGE_MARKS[encrypted] + self._nonce

    def _check_proof(self, proof: bytes) -> bytes:
        about = (self._subject, self.rank, self._nonces)
        if not hmac.compare_digest(proof, _prove(self._key, _CONNECTS, *about)):
            raise HandshakeError(describe_unequal(self.rank, self._subject.target))
        return _prove(self._key, _ACCEPTS, *about)


def maybe_rank_opening(data: bytes | bytearray) -> int | None:
    """The rank in what begins like an opening (of at least `HEADER_BYTES`), else None."""
    if not data.startswith((*_OPENING_MARKS, _QUESTION_MARK)):
        return None
    return int.from_bytes(data[_MARK_BYTES : _MARK_BYTES + 4], "big")


def describe_one_sided(rank: int, target: str) -> str:
    """To who has opened a connection to a side without a secret."""
    return f"rank {rank} has a secret, {target} has none: {_ADVICE}"


def describe_encryption(rank: int, target: str, connecting_encrypts: bool) -> str:
    """Of two sides of which one encrypts."""
    sides = (f"rank {rank}", target)
    who, who_not = sides if connecting_encrypts else sides[::-1]
    return (
        f"{who} encrypts and {who_not} does not: set encryption (or FOREPROP_ENCRYPTION) to the"
        " same on every machine"
    )


def describe_unequal(rank: int, target: str) -> str:
    return f"rank {rank} and {target} have different secrets, or mean different sessions: {_ADVICE}"


def key_of(secret: bytes) -> bytes:
    """The key for all this, 32 bytes; line ends after the secret do not count.

    Raises ValueError for a secret that is too short.
    """
    secret = secret.rstrip(b"\r\n")
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"{len(secret)} bytes; it must be at least {LEAST_SECRET_BYTES}")
    return hashlib.sha256(b"foreprop" + _VERSION + secret).digest()


def token_of(key: bytes, purpose: str, size_bytes: int) -> bytes:
    """What only who has the secret knows, up to 32 bytes; of one purpose always the same."""
    return _mac(key, b"token", purpose.encode())[:size_bytes]


def seed_of(key: bytes, channel: Channel, way: Way) -> bytes:
    """Of the key pair that both ends of a connection have for one way, 32 bytes; a secret."""
    about = (channel.subject, channel.rank, channel.nonces)
    return _prove(key, b"seed " + way.encode(), *about)


# The store.
def sign(key: bytes, name: str, value: bytes) -> bytes:
    """An entry for the store that nobody without the key can make, or put under another name."""
    return SIGNED + _mac(key, _ENTRY, name.encode(), value) + value


def maybe_signed(key: bytes, name: str, entry: bytes) -> bytes | None:
    """The value of an entry, None if it is not signed with this key for this name."""
    head = len(SIGNED) + PROOF_BYTES
    value = entry[head:]
    made = SIGNED + _mac(key, _ENTRY, name.encode(), value)
    return value if hmac.compare_digest(entry[:head], made) else None


def _prove(key: bytes, role: bytes, subject: Subject, rank: int, nonces: bytes) -> bytes:
    about = (subject.session.encode(), subject.target.encode(), rank.to_bytes(4, "big"))
    return _mac(key, role, nonces, *about, b"tls" if subject.encrypted else b"")


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Of the parts and the places between them."""
    sizes = struct.pack(f"!{len(parts)}Q", *map(len, parts))
    return hmac.digest(key, b"".join((_VERSION, sizes, *parts)), "sha256")


def _add(got: bytes, data: bytes, wanted: int) -> tuple[bytes, int]:
    if len(data) > wanted:
        raise RemoteProtocolError(f"{len(data)} bytes where {wanted} were to come")
    return got + data, wanted - len(data)
