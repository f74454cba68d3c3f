"""Native frames against `core.wire`: the same bytes out, and the same frames and errors in."""

from __future__ import annotations

import ctypes
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreprop.core.wire import (
    HEADER_BYTES,
    DamagedPayload,
    Frame,
    FrameReader,
    Header,
    Kind,
    encode_header,
    sealed,
)
from foreprop.engine.stream import load_checksum
from foreprop.errors import RemoteProtocolError
from tests.native.stepped import library

library()  # skips all of this where there is no compiler

AGREED = 24
KNOWN = sum(1 << kind for kind in Kind)
HEADERS = st.builds(
    Header,
    kind=st.sampled_from([Kind.PUSH, Kind.REPLY, Kind.BYE, Kind.DAMAGED]),
    flags=st.integers(0, 2**16 - 1),
    rank=st.integers(0, 2**16 - 1),
    step=st.one_of(st.integers(0, 10), st.integers(0, 2**63 - 1)),
    slice=st.integers(0, 2**32 - 1),
    priority=st.integers(-(2**31), 2**31 - 1),
    payload_bytes=st.sampled_from([0, AGREED, AGREED, AGREED, AGREED + 1]),
)


def encoded(header: Header, payload: bytes, *, checked: bool) -> bytes:
    return sealed(encode_header(*header), payload, load_checksum() if checked else None) + payload


@given(st.binary(max_size=10_000), st.integers(0, 2**32 - 1))
def test_checksums_are_those_of_python(data: bytes, before: int) -> None:
    crc = library().fp_crc32c
    crc.restype = ctypes.c_uint32
    found = crc(data, ctypes.c_int64(len(data)), ctypes.c_uint32(before))
    assert found == load_checksum()(data, before)


@given(HEADERS, st.booleans(), st.binary(min_size=AGREED + 1, max_size=AGREED + 1))
def test_headers_have_the_same_bytes(header: Header, checked: bool, data: bytes) -> None:
    payload = data[: header.payload_bytes]
    out = ctypes.create_string_buffer(HEADER_BYTES)
    library().fp_encode_header((ctypes.c_int64 * 7)(*header), payload, checked, out)
    assert out.raw + payload == encoded(header, payload, checked=checked)


def read_natively(data: bytes, pieces: list[int], *, checked: bool) -> tuple[Any, ...]:
    """Frames with what came of their payloads, then whether one is begun, or the error."""
    out = (ctypes.c_int64 * (8 * len(data) + 8))()
    payloads = ctypes.create_string_buffer(len(data) + AGREED)
    cut, text = ctypes.c_int(), ctypes.create_string_buffer(4096)
    sizes = (ctypes.c_int64 * len(pieces))(*pieces)
    known = ctypes.c_uint64(KNOWN)
    length = library().fp_read(
        data,
        sizes,
        len(pieces),
        known,
        checked,
        AGREED,
        out,
        payloads,
        ctypes.byref(cut),
        text,
        4096,
    )
    if length < 0:
        return (text.value.decode(),)
    frames, at = [], 0
    for first in range(0, length, 8):
        *fields, damaged = out[first : first + 8]
        header = Header(*fields)
        header = header._replace(step=header.step % 2**64)  # the interface has signed numbers
        frames.append((header, None if damaged else payloads.raw[at : at + header.payload_bytes]))
        at += header.payload_bytes
    return frames, bool(cut.value)


def read_by_core(data: bytes, pieces: list[int], *, checked: bool) -> tuple[Any, ...]:
    def destination(header: Header) -> memoryview:
        if header.payload_bytes and header.payload_bytes != AGREED:
            raise RemoteProtocolError("not agreed")
        return memoryview(bytearray(header.payload_bytes))

    reader = FrameReader(destination, load_checksum() if checked else None)
    frames: list[Any] = []
    at = 0
    try:
        for piece in pieces:
            end = at + piece
            while at < end:
                taken = min(end - at, len(reader.buffer))
                reader.buffer[:taken] = data[at : at + taken]
                at += taken
                try:
                    frame: Frame | None = reader.advance(taken)
                except DamagedPayload as error:
                    frames.append((error.header, None))
                    continue
                if frame is not None:
                    frames.append((frame.header, bytes(frame.payload)))
    except RemoteProtocolError as error:
        return (str(error),)
    return frames, reader.mid_frame


@settings(max_examples=400, deadline=None)
@example([(Header(Kind.PUSH, 0, 0, 0, 0, 0, 0), bytes(AGREED + 1))], False, [(8, 128)], [])
@given(
    st.lists(st.tuples(HEADERS, st.binary(min_size=AGREED + 1, max_size=AGREED + 1)), max_size=4),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 255)), max_size=1),
    st.lists(st.integers(1, 80), max_size=6),
)
def test_any_split_of_any_bytes_reads_alike(
    sent: list[tuple[Header, bytes]],
    checked: bool,
    flips: list[tuple[int, int]],
    pieces: list[int],
) -> None:
    data = bytearray(b"".join(encoded(h, d[: h.payload_bytes], checked=checked) for h, d in sent))
    for at, bits in flips:
        if at < len(data):
            data[at] ^= bits
    ends, at = [], 0
    for piece in [*pieces, len(data)]:
        ends.append(min(piece, len(data) - at))
        at += ends[-1]
    read = read_natively(bytes(data), ends, checked=checked)
    assert read == read_by_core(bytes(data), ends, checked=checked)
