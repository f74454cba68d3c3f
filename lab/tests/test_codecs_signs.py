"""1-bit SGD, EF-signSGD and the vote, against their formulas in plain Python."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from codec_runs import PLACE, noise, there_and_back
from hypothesis import given
from hypothesis import strategies as st

from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.codecs import make
from foreprop.features.compression.images import vote

VALUES = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=200)


@given(values=VALUES)
def test_one_bit_sends_the_mean_of_each_side(values: list[float]) -> None:
    given_ = torch.tensor(values)
    numbers = given_.tolist()
    negatives = [x for x in numbers if x < 0]
    others = [x for x in numbers if not x < 0]
    out = there_and_back(make("1bit"), given_).tolist()
    for x, found in zip(numbers, out, strict=True):
        side = negatives if x < 0 else others
        assert found == pytest.approx(math.fsum(side) / len(side), rel=1e-5, abs=1e-37)


@given(values=VALUES)
def test_ef_sign_sends_the_mean_magnitude(values: list[float]) -> None:
    given_ = torch.tensor(values)
    mean = math.fsum(abs(x) for x in given_.tolist()) / len(values)
    out = there_and_back(make("efsign"), given_).tolist()
    for x, found in zip(given_.tolist(), out, strict=True):
        assert found == pytest.approx(-mean if x < 0 else mean, rel=1e-5, abs=1e-37)


def test_the_means_of_many_elements() -> None:
    values = noise(200_003)
    out = there_and_back(make("1bit"), values)
    for side in (values < 0, values >= 0):
        assert out[side].unique().numel() == 1
        assert float(out[side][0]) == pytest.approx(float(values[side].double().mean()), rel=1e-6)


def test_a_sum_that_overflows_is_no_infinity() -> None:
    values = torch.full((1000,), 3e38)
    values[::2] = -3e38
    for name in ("1bit", "efsign"):
        assert torch.allclose(there_and_back(make(name), values), values, rtol=1e-6)


def test_the_vote_is_the_majority_of_signs() -> None:
    gradients = [noise(40_001, seed) for seed in range(4)]
    total = torch.zeros(40_001)
    for gradient in gradients:
        total += there_and_back(make("sign"), gradient)
    expected = []
    for column in zip(*(gradient.tolist() for gradient in gradients), strict=True):
        ayes = sum(x >= 0 for x in column)
        expected.append(float((ayes > 2) - (ayes < 2)))
    assert vote(total).tolist() == expected
    assert set(expected) == {-1.0, 0.0, 1.0}


def test_the_bits_of_the_slice_and_their_levels() -> None:
    values = torch.tensor([-1.0, 2.0, -3.0, 0.0, -0.0, 5.0, 7.0, -8.0, -9.0])
    sent = bytes(make("1bit").encode(values, {}, PLACE))
    assert struct.unpack("=ff", sent[:8]) == pytest.approx((14 / 5, -21 / 4))
    assert sent[8:] == bytes([0b10000101, 0b1]) + b"\0"  # what foreprop adds: all are finite


@pytest.mark.parametrize("name", ["1bit", "efsign", "sign"])
@pytest.mark.parametrize(
    "levels", [(-1.0, -1.0), (1.0, 1.0), (math.inf, -1.0), (math.nan, -1.0), (1.0, math.nan)]
)
def test_levels_that_cannot_be_are_refused(name: str, levels: tuple[float, float]) -> None:
    sent = bytearray(make(name).encode(noise(20), {}, PLACE))
    sent[:8] = struct.pack("=ff", *levels)
    with pytest.raises(RemoteProtocolError, match=f"{name}: .*the levels are"):
        make(name).decode(memoryview(sent), torch.empty(20), PLACE)


def test_a_bit_that_is_no_elements_is_refused() -> None:
    sent = bytearray(make("sign").encode(noise(9), {}, PLACE))
    sent[-2] |= 0b10
    with pytest.raises(RemoteProtocolError, match=r"sign: .*bits are set after the last one"):
        make("sign").decode(memoryview(sent), torch.empty(9), PLACE)
