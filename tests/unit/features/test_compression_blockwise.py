"""int8, int4 and int2 in blocks: torch's own quantisation's bits, bounds, broken bytes."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from codec_runs import PLACE, noise, there_and_back
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

from foreprop.core.codec import Place
from foreprop.engine.native import maybe_library
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.codecs import make
from foreprop.features.compression.kernels import ErrorFeedback
from tests.tiers import long_cases

LEVELS = {"int8": 127, "int4": 7}
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROUNDING = 4 * 2.0**-24
"""float32's own, of scale, quotient and product, relative to the largest magnitude."""


def blocks(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(128))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_bits_are_those_of_ddps_hook_per_channel(name: str) -> None:
    """A block is a channel. The hook's range of 8 bits holds the codes of both."""
    values, levels = noise(128 * 300), LEVELS[name]
    rows = values.view(-1, 128)
    scales = rows.abs().amax(1) / levels
    middle = torch.full((300,), 128.0)
    hooks: Any = quantization_hooks
    codes = hooks._quantize_per_channel_backend(rows, scales, middle)
    expected = hooks._dequantize_per_channel_backend(codes, scales, middle)
    assert torch.equal(there_and_back(make(name), values).view(-1, 128), expected)


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(values=st.lists(FLOATS, min_size=1, max_size=300), size=st.sampled_from([1.0, 1e-30, 1e30]))
def test_no_element_is_off_by_more_than_half_a_scale(
    name: str, values: list[float], size: float
) -> None:
    given_ = torch.tensor(values) * size
    given_.nan_to_num_()
    out = there_and_back(make(name), given_)
    for block, found in zip(blocks(given_), blocks(out), strict=True):
        largest = float(block.abs().max())
        error = float((block.double() - found.double()).abs().max())
        if largest < 1.000001 * LEVELS[name] * 2.0**-100:  # sent as zeros, or just not
            assert error <= largest
        elif largest < 3.4e38:
            assert error <= largest * (0.5 / LEVELS[name] + ROUNDING)
        else:
            assert error <= largest * (0.5 / LEVELS[name] + 1e-3)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("elems", [1, 5, 128, 129, 400])
def test_the_bytes_are_those_of_the_formula(name: str, elems: int) -> None:
    values, levels = noise(elems), LEVELS[name]
    sent = bytes(make(name).encode(values, {}, PLACE))
    scales, codes = [], []
    for block in blocks(values):
        numbers = [np.float32(x) for x in block.tolist()]
        scale = max(abs(x) for x in numbers) / np.float32(levels)
        scales.append(scale)
        codes += [round(float(x / scale)) + levels for x in numbers]
    head = b"".join(struct.pack("=f", scale) for scale in scales)
    if name == "int8":
        assert sent == head + bytes(codes)
    else:
        pairs = zip(codes[::2], [*codes[1::2], *[0] * (elems % 2)], strict=True)
        assert sent == head + bytes(low + 16 * high for low, high in pairs)


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_only_the_block_of_a_nan_is_nan(name: str) -> None:
    values = noise(1000)
    expected = there_and_back(make(name), values)
    values[300] = torch.inf
    expected[256:384] = torch.nan
    found = there_and_back(make(name), values)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_the_largest_float_stays_finite() -> None:
    most = torch.finfo(torch.float32).max
    for name in (*LEVELS, "int2"):
        out = there_and_back(make(name), torch.tensor([most, -most, 1.0]))
        assert out.abs().tolist() == pytest.approx([most, most, 0.0], rel=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_a_scale_that_cannot_be_is_refused(name: str) -> None:
    sent = bytearray(make(name).encode(noise(200), {}, PLACE))
    for scale in (-1.0, -1e-30, torch.inf, -torch.inf, 3.402e38):
        sent[4:8] = struct.pack("=f", scale)
        with pytest.raises(RemoteProtocolError, match=f"{name}: a scale is negative or infinite"):
            make(name).decode(memoryview(sent), torch.empty(200), PLACE)


@pytest.mark.parametrize(
    ("name", "code"), [("int2", 0xC0), ("int4", 0x7F), ("int4", 0xF7), ("int8", 0xFF)]
)
def test_a_code_that_cannot_be_is_refused(name: str, code: int) -> None:
    sent = bytearray(make(name).encode(noise(200), {}, PLACE))
    sent[20] = code  # behind two scales
    with pytest.raises(RemoteProtocolError, match=f"{name}: a code is above"):
        make(name).decode(memoryview(sent), torch.empty(200), PLACE)


@pytest.mark.skipif(maybe_library() is None, reason="the library was not built")
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("elems", [1, 128, 3125, *long_cases(127, 129, 70_001)])
def test_keeping_the_error_while_encoding_has_the_bits_of_doing_it_after(
    name: str, elems: int
) -> None:
    """Steps with a NaN or an infinity, which must not be remembered, among them."""
    at_once = make(name)
    assert isinstance(at_once, ErrorFeedback)
    assert at_once.encode_with is not None
    after = ErrorFeedback(at_once.codec)
    states = [dict(codec.new_state(elems)) for codec in (at_once, after)]
    for step in range(6):
        values = noise(elems) * (step + 1)
        if step in (2, 4):
            values[elems // 2] = torch.nan if step == 2 else torch.inf
        place = Place(step, 0, 0)
        sent = [c.encode(values, s, place) for c, s in zip((at_once, after), states, strict=True)]
        assert bytes(sent[0]) == bytes(sent[1])
        first, second = (state["error"].view(torch.int32) for state in states)
        assert torch.equal(first, second)
    assert bool(states[0]["error"].any()) == (elems > 1)  # a block of one is sent as it is


BITS = st.lists(st.integers(0, 2**32 - 1), max_size=300)


@pytest.mark.skipif(maybe_library() is None, reason="the library was not built")
@pytest.mark.parametrize("name", ["int8", "int4"])
@given(numbers=BITS, errors=st.none() | st.lists(FLOATS, max_size=20), data=st.data())
def test_the_native_library_has_the_bits_of_numpy(
    name: str, numbers: list[int], errors: list[float] | None, data: st.DataObject
) -> None:
    """Of any values, with an error or without; and it takes the same bytes for a code."""
    native: Any = make(name)
    assert native.codec.library is not None
    assert native.encode_with is not None
    both = native, ErrorFeedback(replace(native.codec, library=None))
    values = torch.from_numpy(np.array(numbers, np.uint32).view(np.float32))
    elems, sent, left = len(values), [], []
    for each in both:
        if errors is None:
            sent.append(bytearray(each.encode(values, {}, PLACE)))
            continue
        error = torch.from_numpy(np.resize(np.array([0.0, *errors], np.float32), elems))
        sent.append(bytearray(each.encode(values, {"error": error}, PLACE)))
        left.append(error.view(torch.int32))
    assert all(torch.equal(left[0], error) for error in left)
    scales = [np.frombuffer(code, np.float32, -(-elems // 128)) for code in sent]
    np.testing.assert_array_equal(*scales)  # one NaN is as good as another
    assert sent[0][scales[0].nbytes :] == sent[1][scales[0].nbytes :]
    if elems and data.draw(st.booleans()):
        sent[0][data.draw(st.integers(0, len(sent[0]) - 1))] ^= data.draw(st.integers(1, 255))
    found: list[Any] = []
    for each in both:
        out = torch.zeros(elems)
        try:
            each.decode(memoryview(sent[0]), out, PLACE)
        except RemoteProtocolError as error:
            found.append(str(error))
        else:
            found.append(out.nan_to_num(7.0).tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("elems", [1, 5, 128, 129, 400])
def test_the_three_levels_are_max_of_the_mean_magnitude(elems: int) -> None:
    """Zeros in a block are no part of the mean; and no level is beyond the block's
    largest element."""
    values = noise(elems)
    values[1:200:3] = 0.0
    found = there_and_back(make("int2"), values)
    for block, out in zip(blocks(values), blocks(found), strict=True):
        magnitudes = [abs(x) for x in block.tolist() if x]
        mean = sum(magnitudes) / max(1, len(magnitudes))
        level = min(1.224 * math.sqrt(math.pi / 2) * mean, max(magnitudes, default=0.0))
        expected = [math.copysign(level, x) if abs(x) > level / 2 else 0.0 for x in block.tolist()]
        assert out.tolist() == pytest.approx(expected, rel=1e-5)


@given(values=st.lists(FLOATS, min_size=1, max_size=300))
def test_no_element_is_off_by_more_than_it_is_large_with_three_levels(values: list[float]) -> None:
    """And each block's largest by less, unless it is sent as zeros: so answers come nearer."""
    given_ = torch.tensor(values)
    out = there_and_back(make("int2"), given_)
    for block, found in zip(blocks(given_.double()), blocks(out.double()), strict=True):
        error, magnitudes = (block - found).abs(), block.abs()
        assert bool((error <= magnitudes * (1 + 1e-3)).all())
        if float(magnitudes.max()) > 2.0**-90:
            largest = int(magnitudes.argmax())
            assert float(error[largest]) < float(magnitudes[largest])
