"""The wire format: a fixed header, then the payload's raw bytes. This module knows no socket.

A frame is ``magic, version, kind, flags, rank, step, slice, priority, payload_bytes`` in network
byte order, two checks (36 bytes in all), and ``payload_bytes`` bytes. The invariant: any sequence
of bytes either decodes or raises `RemoteProtocolError`, never anything else, and no length that
came from a peer is used before ``destination``, which knows the right length, has agreed to it.

The checks are the CRC32C (RFC 3385) of the payload, and then that of the header so far: a frame
that was changed on the way is refused, and its header is checked before it is used. On an encrypted
connection nothing can be changed unseen, so both are 0 there and are not looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from foreprop.errors import LocalProtocolError, RemoteProtocolError

T = TypeVar("T")

MAGIC = 0xF0E9
PROTOCOL_VERSION = 3
MAX_PAYLOAD_BYTES = 2**32 - 1
MAX_CONTROL_BYTES = 64 * 1024 * 1024
"""The bound for payloads whose size the receiver cannot know beforehand (manifest, failure)."""

SIGNED = b"foreprop-signed1"
"""How a signed entry of the store begins (`core.authentication`)."""

_LAYOUT = struct.Struct("!HBBHHQIiI")
_CHECK = struct.Struct("!I")
_CHECKED_BYTES = _LAYOUT.size + _CHECK.size  # by the header's own check
HEADER_BYTES = _CHECKED_BYTES + _CHECK.size
_UNSEALED = bytes(2 * _CHECK.size)

Checksum = Callable[[bytes | bytearray | memoryview, int], int]
"""CRC32C of bytes; the second argument is that of the bytes before them, 0 at first."""


class Kind(IntEnum):
    """What a frame is. W: sent by workers, S: by servers."""

    HELLO = 1  # W: the session's id, the first frame on a connection, sent at once
    WELCOME = 2  # S: every worker's manifest agrees
    MANIFEST = 3  # W: as JSON
    HYPERPARAMETERS = 4  # W: the optimizer's numbers from this step on
    VALUE = 5  # W (rank 0): a slice's parameter values, from before this step's push
    PUSH = 6  # W: a slice's gradient
    REPLY = 7  # S: a slice's updated parameters
    NOTIFY = 8  # S: a slice has been updated
    PULL = 9  # W: send me this slice
    BLOB = 10  # W (rank 0): buffers or frozen parameters; `slice` says which
    BLOB_PULL = 11  # W
    BLOB_REPLY = 12  # S
    STATE = 13  # W (rank 0): a slice's optimizer state
    STATE_PULL = 14  # W
    STATE_REPLY = 15  # S
    STATUS_PULL = 16  # W: what does this slice wait for?
    STATUS_REPLY = 17  # S
    FAILURE = 18  # both: the session has failed; why
    BYE = 19  # W: nothing more will come; S that may be lost: all workers have said so
    ROWS_VALUE = 20  # W (rank 0): values of some of a shard's rows; `slice` is the shard's number
    ROWS_PUSH = 21  # W: gradients of some of a shard's rows
    ROWS_PULL = 22  # W: send me these rows as they are after `step`; `slice` is the request's
    ROWS_REPLY = 23  # S: the rows of a request
    NORM_PART = 24  # S: to rank 0, the sum of this server's squares of a step's gradients
    NORM = 25  # W (rank 0) to servers, server 0 to the other workers: the step's global norm
    TABLE = 26  # W (rank 0): rows of a remote table with all that is kept of them; `slice`: shard
    TABLE_PULL = 27  # W: send me a part of what is kept of this shard
    TABLE_REPLY = 28  # S
    PACE = 29  # W: how long its last steps took
    PACE_REPORT = 30  # S: who was late in them
    LEFT = 31  # S: a worker has left, and the others go on
    CLAIM = 35  # W: by slice of a lost server, the last round whose average it has
    SETTLED = 36  # S: by slice the round that it goes on after, and who is to give its average
    TAKEN_OVER = 37  # W: that average
    MOVES = 38  # W: what slices do before `step`; S: passed on to all members
    JOIN = 39  # W: count me from `step` on; S: whether that is promised
    JOINED = 40  # W: all servers have promised it; S: to all, who counts from which step on
    SERVERS = 41  # W: where all listen, or, as the first frame, the question; S: the answer
    POSITIONS = 42  # W: where its loaders are, for who joins (`slice`) at `step`; S: passed on
    TRAINABLE = 43  # W: which parameters it has frozen and unfrozen, as it ends `step`
    PULSE = 44  # W: the first frame on a connection on which both ends say only that they are there
    GIVEN = 32  # W: a part of what a newcomer begins with, whose first step follows; S: passed on
    DAMAGED = 45  # S: a gradient has not come as it was sent: has it changed meanwhile?


class Flag(IntEnum):
    """Bits of the header's ``flags``."""

    NO_GRADIENT = 1  # PUSH: unused in this step on this rank
    VALUE_CHANGED = 2  # PUSH: the parameter was changed by hand since the last step
    DROPPED = VALUE_CHANGED  # REPLY: what it answers does not count
    UNCHANGED = 4  # REPLY, NOTIFY: no rank had a gradient; keep what you have
    MORE = 8  # ROWS_VALUE, ROWS_PUSH: another part follows
    AVERAGES = 16  # STATE, STATE_PULL: moving averages instead of the optimizer's state
    MASTER = 32  # STATE_PULL: the values in full instead of the optimizer's state
    BUILDS_ON = AVERAGES  # PUSH: what is averaged has the average of the round before in it
    ANEW = 64  # TABLE: forget first what has been kept; ROWS_PULL: the same, a relay's rows
    LATE = (
        ANEW  # pushes: of values newer than their step's; replies: the values are newer than that
    )
    GRADIENT = 128  # PUSH: workers update: answer with the aggregated gradient
    MEASURE = 256  # PUSH: and tell every worker the sums of squares of all of them
    EXPOSED = 512  # PUSH: the parameter may have been changed through `p.data`
    RESIDUAL = 1024  # STATE, STATE_PULL: what a relay's codecs keep


ROUND_SHIFT = 10
"""Above a push's flags: how many rounds of this step it follows (`params.averaging`)."""
MOST_ROUNDS = 1 << 6


class Header(NamedTuple):
    """A decoded header. ``rank`` is the sender's rank (workers) or index (servers)."""

    kind: int
    flags: int
    rank: int
    step: int
    slice: int
    priority: int
    payload_bytes: int


_KINDS = frozenset(int(kind) for kind in Kind)


def encode_header(
    kind: int, flags: int, rank: int, step: int, slice_: int, priority: int, payload_bytes: int
) -> bytes:
    """A header without its checks, which `sealed` fills in.

    Raises `LocalProtocolError` for what the header cannot hold (a payload of 4 GiB, say).
    """
    fields = (kind, flags, rank, step, slice_, priority, payload_bytes)
    try:
        return _LAYOUT.pack(MAGIC, PROTOCOL_VERSION, *fields) + _UNSEALED
    except struct.error as error:
        raise LocalProtocolError(
            f"no header can hold {Header(*fields)}: {error}; larger pieces than 4 GiB need"
            " granularity='slice'"
        ) from error


def sealed(header: bytes, payload: bytes | memoryview, checksum: Checksum | None) -> bytes:
    """The header with its checks; as it is without a ``checksum``, on an encrypted connection.

    The payload must stay as it is until it is sent.
    """
    if checksum is None:
        return header
    of_payload = _CHECK.pack(checksum(payload, 0) if payload else 0)
    checked = header[: _LAYOUT.size] + of_payload
    return checked + _CHECK.pack(checksum(checked, 0))


def check_header(data: bytes | memoryview, checksum: Checksum) -> None:
    """Raise `RemoteProtocolError` if a whole header is not as it was sent."""
    (sent,) = _CHECK.unpack_from(data, _CHECKED_BYTES)
    if (found := checksum(data[:_CHECKED_BYTES], 0)) != sent:
        raise RemoteProtocolError(_damage("a frame's header", sent, found))


def check_payload(
    data: bytes | memoryview, header: Header, payload: bytes | memoryview, checksum: Checksum
) -> None:
    """Raise `DamagedPayload` if a payload is not as it was sent; ``data`` is the header's bytes."""
    (sent,) = _CHECK.unpack_from(data, _LAYOUT.size)
    if payload and (found := checksum(payload, 0)) != sent:
        what = f"{Kind(header.kind).name} of slice {header.slice}, step {header.step}"
        raise DamagedPayload(header, sent, found, f"{what} ({len(payload)} bytes)")


class DamagedPayload(RemoteProtocolError):
    """A frame's payload is not what its header says."""

    def __init__(self, header: Header, sent: int, found: int, what: str) -> None:
        super().__init__(_damage(what, sent, found))
        self.header = header
        about = (header.flags, header.priority, header.payload_bytes)
        self.question = Damage(sent, found, *about)


class Damage(NamedTuple):
    """What a DAMAGED frame says: both checksums, and the push's flags, priority and size."""

    told: int
    found: int
    flags: int
    priority: int
    size_bytes: int

    def encode(self) -> bytes:
        return _DAMAGE.pack(*self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Damage:
        return cls(*_DAMAGE.unpack(data))

    def describe(self, header: Header) -> str:
        """The damage in words; ``header`` is that of a frame about the push's slice and step."""
        what = f"PUSH of slice {header.slice}, step {header.step} ({self.size_bytes} bytes)"
        return _damage(what, self.told, self.found)


_DAMAGE = struct.Struct("!IIHiI")
DAMAGE_BYTES = _DAMAGE.size


def _damage(what: str, sent: int, found: int) -> str:
    return (
        f"{what} has come damaged: its CRC32C is {found:#010x}, and was {sent:#010x} when it was"
        " sent. Look at memory, network cards and cables of both hosts"
    )


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Decode exactly `HEADER_BYTES` bytes; raises `RemoteProtocolError` for anything else."""
    if len(data) != HEADER_BYTES:
        raise RemoteProtocolError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
    magic, version, kind, flags, rank, step, slice_, priority, payload = _LAYOUT.unpack_from(data)
    if magic != MAGIC:
        raise RemoteProtocolError(f"not a foreprop peer: magic is {magic:#06x}, not {MAGIC:#06x}")
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"the peer speaks protocol version {version}, this process {PROTOCOL_VERSION}:"
            " install the same foreprop on all machines"
        )
    if kind not in _KINDS:
        raise RemoteProtocolError(f"unknown frame kind {kind}")
    return Header(kind, flags, rank, step, slice_, priority, payload)


class Frame(NamedTuple):
    header: Header
    payload: memoryview


Destination = Callable[[Header], memoryview]
"""Where a frame's payload goes: called once its header is known, before any payload byte is read.

It must check ``payload_bytes`` against what it knows and raise `RemoteProtocolError`, or return
a writable view of exactly that many bytes.
"""

_EMPTY = memoryview(b"")


class FrameReader:
    """Assembles frames without copying payloads: fill `buffer`, then say how much with `advance`.

    Any split of the incoming bytes gives the same frames. They are checked with the ``checksum``
    that they were `sealed` with.
    """

    __slots__ = (
        "_checksum",
        "_destination",
        "_header",
        "_header_view",
        "_is_first",
        "_whole",
        "buffer",
    )

    def __init__(self, destination: Destination, checksum: Checksum | None = None) -> None:
        self._destination = destination
        self._checksum = checksum
        self._is_first = True
        self._header_view = memoryview(bytearray(HEADER_BYTES))
        self._whole = self._header_view
        self.buffer = self._whole  # the bytes wanted next; never empty
        self._header: Header | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether a connection that ends now would cut a frame in two."""
        return len(self.buffer) < len(self._whole) or self._header is not None

    def advance(self, received_bytes: int) -> Frame | None:
        """Account for bytes written to the start of `buffer`; returns a frame once complete.

        After `DamagedPayload` the next frame can be read; after other errors nothing can.
        """
        if received_bytes < len(self.buffer):
            self.buffer = self.buffer[received_bytes:]
            return None
        header = self._header
        if header is None:
            if self._is_first:  # of another program or version: that error before the check's
                decode_header(self._header_view)
            self._is_first = False
            if self._checksum is not None:
                check_header(self._header_view, self._checksum)
            header = decode_header(self._header_view)
            view = self._destination(header)
            if len(view) != header.payload_bytes:
                raise RemoteProtocolError(
                    f"{Kind(header.kind).name} carries {header.payload_bytes} bytes where"
                    f" {len(view)} belong (slice {header.slice}, step {header.step})"
                )
            if header.payload_bytes:
                self._header, self._whole = header, view
                self.buffer = view
                return None
            self.buffer = self._header_view
            return Frame(header, _EMPTY)
        payload = self._whole
        self._header, self._whole = None, self._header_view
        self.buffer = self._header_view
        if self._checksum is not None:
            check_payload(self._header_view, header, payload, self._checksum)
        return Frame(header, payload)


def decoded(decoder: msgspec.json.Decoder[T], data: bytes | memoryview, what: str) -> T:
    """Decode JSON from a peer strictly; raises `RemoteProtocolError` if it is not ``what``."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not {what}: {error}") from error
