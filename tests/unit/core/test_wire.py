"""Bytes become the same frames however they are split, or `RemoteProtocolError`."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreprop.core.wire import (
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Damage,
    DamagedPayload,
    FrameReader,
    Header,
    Kind,
    decode_header,
    encode_header,
    sealed,
)
from foreprop.engine.stream import load_checksum
from foreprop.errors import ConfigError, LocalProtocolError, RemoteProtocolError

LIMIT_BYTES = 4096
FIELD_BYTES = HEADER_BYTES - 8
HEADERS = st.builds(
    Header,
    kind=st.sampled_from([int(kind) for kind in Kind]),
    flags=st.integers(0, 2**16 - 1),
    rank=st.integers(0, 2**16 - 1),
    step=st.integers(0, 2**64 - 1),
    slice=st.integers(0, 2**32 - 1),
    priority=st.integers(-(2**31), 2**31 - 1),
    payload_bytes=st.just(0),
)
FRAMES = st.lists(st.tuples(HEADERS, st.binary(max_size=70)), max_size=5)


def allocate(header: Header) -> memoryview:
    if header.payload_bytes > LIMIT_BYTES:
        raise RemoteProtocolError("too large")
    return memoryview(bytearray(header.payload_bytes))


def encode(frames: Iterable[tuple[Header, bytes]]) -> bytes:
    return b"".join(encode_header(*h[:6], len(payload)) + payload for h, payload in frames)


def read(reader: FrameReader, data: bytes) -> list[tuple[Header, bytes]]:
    """Give the reader one piece of the stream, as a socket would: never more than it wants."""
    frames = []
    while data:
        size = min(len(data), len(reader.buffer))
        reader.buffer[:size] = data[:size]
        frame = reader.advance(size)
        if frame is not None:
            frames.append((frame.header, bytes(frame.payload)))
        data = data[size:]
    return frames


def test_the_header_has_36_bytes_in_network_order() -> None:
    header = Header(Kind.PUSH, 2, 0x0102, 0x0A0B0C0D, 7, -1, 200_000)
    fields = "f0e9 03 06 0002 0102 000000000a0b0c0d 00000007 ffffffff 00030d40 00000000 00000000"
    assert encode_header(*header) == bytes.fromhex(fields)
    assert decode_header(bytes.fromhex(fields)) == header
    assert HEADER_BYTES == 36


@given(HEADERS, st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_headers_round_trip(header: Header, payload_bytes: int) -> None:
    header = header._replace(payload_bytes=payload_bytes)
    assert decode_header(encode_header(*header)) == header


@given(FRAMES, st.lists(st.integers(1, 80), max_size=40), st.binary(max_size=HEADER_BYTES - 1))
@settings(max_examples=200, deadline=None)
def test_any_split_of_the_bytes_gives_the_same_frames(
    frames: list[tuple[Header, bytes]], sizes: list[int], trailing: bytes
) -> None:
    expected = [(h._replace(payload_bytes=len(payload)), payload) for h, payload in frames]
    data = encode(frames)
    assert read(FrameReader(allocate), data) == expected  # whole

    reader = FrameReader(allocate)
    one_by_one = [frame for byte in data for frame in read(reader, bytes([byte]))]
    assert one_by_one == expected
    assert not reader.mid_frame

    reader, got, rest = FrameReader(allocate), [], data + trailing
    for size in [*sizes, len(rest)]:
        got += read(reader, rest[:size])
        rest = rest[size:]
    assert got == expected
    assert reader.mid_frame == bool(trailing)


@given(
    st.one_of(st.binary(max_size=200), st.builds(lambda f, t: encode(f) + t, FRAMES, st.binary()))
)
@example(encode_header(6, 0, 0, 0, 0, 0, 2**32 - 1))
@example(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
@settings(max_examples=300, deadline=None)
def test_any_bytes_parse_or_raise_remote_protocol_error(data: bytes) -> None:
    try:
        frames = read(FrameReader(allocate), data)
    except RemoteProtocolError:
        return
    assert sum(HEADER_BYTES + len(payload) for _, payload in frames) <= len(data)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.data())
@settings(max_examples=200, deadline=None)
def test_a_header_with_the_right_start_parses_or_raises(noise: bytes, data: st.DataObject) -> None:
    start = bytes([MAGIC >> 8, MAGIC & 255, PROTOCOL_VERSION, data.draw(st.integers(0, 30))])
    head = start + noise[4:]
    if start[3] in set(Kind):
        assert encode_header(*decode_header(head))[:FIELD_BYTES] == head[:FIELD_BYTES]
    else:
        with pytest.raises(RemoteProtocolError, match=f"^unknown frame kind {start[3]}$"):
            decode_header(head)


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"a header has 36 bytes, got {size}"):
        decode_header(bytes(size))


def test_a_stranger_and_another_version_are_told_apart() -> None:
    good = bytearray(encode_header(Kind.BYE, 0, 0, 0, 0, 0, 0))
    with pytest.raises(RemoteProtocolError, match="not a foreprop peer: magic is 0x4745, not 0xf0"):
        decode_header(b"GE" + good[2:])
    good[2] = PROTOCOL_VERSION + 1
    message = "speaks protocol version 4, this process 3: install the same foreprop"
    with pytest.raises(RemoteProtocolError, match=message):
        decode_header(good)


def test_a_payload_of_another_size_than_the_destination_s_is_refused_before_it_is_read() -> None:
    reader = FrameReader(lambda header: memoryview(bytearray(8)))
    message = r"^PUSH carries 9 bytes where 8 belong \(slice 3, step 5\)$"
    with pytest.raises(RemoteProtocolError, match=message):
        read(reader, encode_header(Kind.PUSH, 0, 1, 5, 3, 0, 9))


def test_the_payload_lands_where_the_destination_says() -> None:
    memory = bytearray(6)
    reader = FrameReader(lambda header: memoryview(memory)[2:5])
    read(reader, encode_header(Kind.REPLY, 0, 0, 1, 0, 0, 3) + b"abc")
    assert memory == b"\0\0abc\0"


def test_an_empty_payload_needs_an_empty_destination() -> None:
    reader = FrameReader(lambda header: memoryview(bytearray(4)))
    with pytest.raises(RemoteProtocolError, match="REPLY carries 0 bytes where 4 belong"):
        read(reader, encode_header(Kind.REPLY, 0, 0, 1, 0, 0, 0))


@pytest.mark.parametrize(
    "field", [{"payload_bytes": 2**32}, {"rank": 2**16}, {"step": -1}, {"priority": 2**31}]
)
def test_what_a_header_cannot_hold_is_our_own_error(field: dict[str, int]) -> None:
    header = Header(Kind.PUSH, 0, 0, 1, 0, 0, 0)._replace(**field)
    with pytest.raises(LocalProtocolError, match="no header can hold"):
        encode_header(*header)


# Checks.
CRC32C = load_checksum()


def seal(header: Header, payload: bytes) -> bytes:
    return sealed(encode_header(*header[:6], len(payload)), payload, CRC32C) + payload


def test_the_checks_are_crc32c() -> None:
    """The payload's, with the check value of RFC 3720; then that of all before it."""
    frame = seal(Header(Kind.BLOB, 0, 0, 0, 0, 0, 0), b"123456789")
    assert frame[28:32].hex() == "e3069283"
    assert int.from_bytes(frame[32:36], "big") == CRC32C(frame[:32], 0)
    empty = seal(Header(Kind.BYE, 0, 0, 0, 0, 0, 0), b"")
    assert empty[28:32] == bytes(4)


@pytest.mark.parametrize("make", [bytes, bytearray, lambda size: np.zeros(size, np.uint8).data])
def test_a_checksum_takes_memory_as_it_lies(make: Callable[[int], Any]) -> None:
    memory = memoryview(make(8_000_000))[3:]
    tracemalloc.start()
    assert CRC32C(memory, 0) == CRC32C(memory[1_000:], CRC32C(memory[:1_000], 0))
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@given(HEADERS, st.binary(max_size=70), st.data())
@settings(max_examples=200, deadline=None)
def test_any_bit_that_is_flipped_is_noticed(
    header: Header, payload: bytes, data: st.DataObject
) -> None:
    """One in a header is noticed before anything is made of what it says."""
    first, frame = seal(header, payload), bytearray(seal(header, payload))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= 1 << data.draw(st.integers(0, 7))
    asked: list[Header] = []

    def destination(told: Header) -> memoryview:
        asked.append(told)
        return allocate(told)

    reader = FrameReader(destination, CRC32C)
    told = header._replace(payload_bytes=len(payload))
    assert read(reader, first) == [(told, payload)]
    with pytest.raises(RemoteProtocolError, match=r"has come damaged: its CRC32C is 0x[0-9a-f]{8}"):
        read(reader, bytes(frame))
    assert len(asked) == (1 if place < HEADER_BYTES else 2)


def test_after_a_damaged_payload_the_next_frame_is_read() -> None:
    header = Header(Kind.PUSH, 3, 1, 5, 7, -2, 4)
    frame = bytearray(seal(header, b"abcd"))
    frame[-1] ^= 1
    reader = FrameReader(allocate, CRC32C)
    with pytest.raises(DamagedPayload) as raised:
        read(reader, bytes(frame))
    damage = Damage.decode(raised.value.question.encode())
    assert damage == (CRC32C(b"abcd", 0), CRC32C(b"abce", 0), 3, -2, 4)
    assert damage.describe(header) == str(raised.value)
    assert read(reader, seal(header, b"abcd")) == [(header, b"abcd")]
    assert not reader.mid_frame


def test_a_first_header_of_another_program_is_no_damage() -> None:
    with pytest.raises(RemoteProtocolError, match="not a foreprop peer"):
        read(FrameReader(allocate, CRC32C), b"GET / HTTP/1.1\r\n" * 3)
    old = bytearray(seal(Header(Kind.HELLO, 0, 0, 0, 0, 0, 0), b""))
    old[2] = 2
    with pytest.raises(RemoteProtocolError, match="speaks protocol version 2, this process 3"):
        read(FrameReader(allocate, CRC32C), bytes(old))


def test_without_its_package_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    with pytest.raises(ConfigError, match=r"awscrt cannot be imported .* pip install awscrt on"):
        load_checksum.__wrapped__()
