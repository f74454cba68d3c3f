"""The exact codec: any bits come back, noise is left alone, and nothing else is decoded."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.codec import Place
from foreprop.errors import ConfigError, RemoteProtocolError
from foreprop.features.compression.codecs import make
from foreprop.features.compression.lossless import Lossless

CODEC = Lossless()
PLACE = Place(1, 2, 0)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SPECIAL = [0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF, 0]
"""NaNs with payloads, infinities, a signed zero, denormals."""


def tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    whole = data[: len(data) // dtype.itemsize * dtype.itemsize]
    return torch.frombuffer(bytearray(whole), dtype=dtype) if whole else torch.empty(0, dtype=dtype)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    return torch.equal(ours.view(words), theirs.view(words))


def check_round_trip(values: torch.Tensor) -> int:
    """Every bit comes back; returns how many bytes it took."""
    before = values.clone()
    code = CODEC.encode(values, {}, PLACE)
    assert same_bits(values, before)
    out = torch.full_like(values, 7)
    CODEC.decode(code, out, PLACE)
    assert same_bits(out, values)
    if values.dtype == torch.float32:
        assert len(code) <= CODEC.most_bytes(values.numel())
    return len(code)


@given(st.binary(max_size=300), st.sampled_from(FLOATS), st.integers(1, 60))
def test_any_bits_come_back(data: bytes, dtype: torch.dtype, times: int) -> None:
    check_round_trip(tensor_of(data * times, dtype))


@given(st.lists(st.sampled_from(SPECIAL), max_size=50))
def test_special_values_come_back(bits: list[int]) -> None:
    check_round_trip(torch.from_numpy(np.array(bits, np.uint32).view(np.float32)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_length(dtype: torch.dtype) -> None:
    for elems in (0, 1, 2, 3, 50_000):
        generator = torch.Generator().manual_seed(elems)
        check_round_trip((torch.randn(elems, generator=generator) * 1e-3).to(dtype))


def test_gradients_shrink_by_their_exponents_and_differences_by_half() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(50_000, generator=generator) * 0.05
    assert check_round_trip(values) < 0.87 * 200_000
    moved = values - 1e-4 * torch.randn(50_000, generator=generator)
    change = (values.view(torch.int32) ^ moved.view(torch.int32)).view(torch.float32)
    assert check_round_trip(change) < 0.72 * 200_000
    assert check_round_trip(torch.zeros(50_000)) < 400


def test_noise_is_left_as_it_is() -> None:
    bits = torch.randint(0, 256, (200_000,), dtype=torch.uint8).view(torch.float32)
    assert check_round_trip(bits) == 200_000 + 4 * 5


def code_of(elems: int = 1000) -> bytes:
    return bytes(CODEC.encode(torch.arange(elems, dtype=torch.float32), {}, PLACE))


def check_refused(code: bytes, elems: int = 1000) -> None:
    with pytest.raises(RemoteProtocolError, match="lossless: "):
        CODEC.decode(memoryview(code), torch.empty(elems), PLACE)


def decode_or_refuse(code: bytes, elems: int) -> None:
    """Nothing else may happen."""
    with contextlib.suppress(RemoteProtocolError):
        CODEC.decode(memoryview(code), torch.empty(elems), PLACE)


@given(st.binary(max_size=64), st.integers(0, 40))
def test_any_bytes_are_decoded_or_refused(data: bytes, elems: int) -> None:
    decode_or_refuse(data, elems)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_decoded_or_refused(place: int, flip: int) -> None:
    code = bytearray(code_of())
    code[place % len(code)] ^= flip
    decode_or_refuse(bytes(code), 1000)


def test_what_is_too_short_or_too_long_is_refused() -> None:
    check_refused(b"")
    check_refused(code_of()[:-1])
    check_refused(code_of() + b"\0")
    check_refused(code_of(1001))


def test_a_frame_that_would_take_more_room_is_not_begun() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    assert len(bomb) < 50_000
    head = b"\1" + len(bomb).to_bytes(4, "little") + (b"\0" + (50_000).to_bytes(4, "little")) * 3
    check_refused(head + bomb + bytes(150_000), elems=50_000)


def test_an_unknown_codec_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'loosless'; there are \[.*'lossless'") as error:
        make("loosless")
    assert "did you mean 'lossless'?" in str(error.value)
